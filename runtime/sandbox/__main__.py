from meshlm.runtime.sandbox.fork_server import main

main()
