"""Where each microsecond of a decode step of the real stack goes: see __main__."""
