"Run the command line: `python -m minivllm`"
import sys

from minivllm.cli import main

sys.exit(main())
