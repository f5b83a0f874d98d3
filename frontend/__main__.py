import meshlm.runtime.structlog_alone  # noqa: F401  # before what imports structlog
from meshlm.frontend.main import main

main()
