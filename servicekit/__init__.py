"""Plumbing that all services share. No request, token or block type; at most 500 lines."""
