from meshlm.frontend.main import main

main()
