"Run the command line: `python -m minivllm`"
import sys

from minivllm.cli import main

if __name__ == "__main__":  # a spawned process imports this file again, under another name
    sys.exit(main())
