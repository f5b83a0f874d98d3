from meshlm.store.main import main

main()
