"""Runnable tools around the server: demo model, demo, measurements. Not installed with the package."""
