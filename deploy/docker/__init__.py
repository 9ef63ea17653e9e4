"""The images: a Dockerfile each, and `python -m deploy.docker`, which builds them."""
