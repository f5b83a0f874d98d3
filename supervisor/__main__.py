"""`meshlm`: the command line."""

from meshlm.supervisor.cli.main import main

if __name__ == "__main__":
    main()
