"""What is run on a machine with a GPU: is it right, and how fast is it."""
