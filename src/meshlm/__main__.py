"""`python -m meshlm`: the command line."""

from meshlm.supervisor.cli import main

if __name__ == "__main__":
    main()
