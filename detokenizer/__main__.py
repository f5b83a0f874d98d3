from meshlm.detokenizer.main import main

main()
