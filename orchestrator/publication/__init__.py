"""`sweep publish`: runs as a folder to share, without host and user names."""
