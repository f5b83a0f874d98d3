from meshlm.workers.main import main

main()
