from meshlm.mediaproc.main import main

main()
