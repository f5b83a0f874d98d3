from meshlm.coordinator.main import main

main()
