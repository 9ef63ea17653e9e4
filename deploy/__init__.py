"""How Quire is put on machines. `local` is the one-machine launcher."""
