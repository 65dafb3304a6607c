"""What the scripts share: each module has one job, and its test holds a slow, obvious reference."""
