"""What the machine looks like and how ranks sit on it."""
