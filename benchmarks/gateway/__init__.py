"""What the gateway's process costs a token, and what it adds to a token's way: see __main__."""
