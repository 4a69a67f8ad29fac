"""How threads that write in the background make way for those that train."""

import os
import sys
import threading

NICE = 5  # enough that training gets a core before they do, and little enough that a busy machine does not starve them


def make_way() -> None:
    """Called by a thread, for itself."""
    if sys.platform == "linux":  # elsewhere it would be the whole process
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
