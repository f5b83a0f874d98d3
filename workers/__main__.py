import meshlm.runtime.structlog_alone  # noqa: F401  # before what imports structlog
from meshlm.workers.main import main

main()
