"""python -m scheduler_svc."""

from scheduler_svc.app import main
from servicekit import process

if __name__ == "__main__":
    process.run(main)
