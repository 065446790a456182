"""What ranks say and conclude of one window."""
