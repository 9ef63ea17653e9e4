"""Studies in virtual time: recorded traffic, clusters that nobody here has."""
