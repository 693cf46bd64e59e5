"""What is saved and loaded."""
