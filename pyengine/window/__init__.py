"""What ranks count in a window, compare, and conclude from it."""
