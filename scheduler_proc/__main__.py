import meshlm.runtime.structlog_alone  # noqa: F401  # before what imports structlog
from meshlm.scheduler_proc.main import main

main()
