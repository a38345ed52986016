"""Prints what a process sees of itself; ends with the status that its argument names."""

import json
import os
import signal
import sys

if __name__ == "__main__":
    seen = {
        "arguments": sys.argv[1:],
        "environment": dict(os.environ),
        "folder": os.getcwd(),
        "leads": os.getpid() == os.getsid(0) == os.getpgid(0),
        "input": os.readlink("/proc/self/fd/0"),
        "open": sorted(os.listdir("/proc/self/fd")),
        "handlers": [
            str(signal.getsignal(n)) for n in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD)
        ],
    }
    print(json.dumps(seen))
    sys.exit(int(sys.argv[1]))
