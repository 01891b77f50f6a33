"Run the command line: `python -m minivllm`, or the installed `minivllm`"
import sys


def main() -> int:  # exit code
    "The command line, which also leaves quietly when Ctrl-C comes while PyTorch is being imported"
    try:
        from minivllm.cli import main as run

        return run()
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":  # a spawned process imports this file again, under another name
    sys.exit(main())
