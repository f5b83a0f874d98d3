from meshlm.scheduler_proc.main import main

main()
