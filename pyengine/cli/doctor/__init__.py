"""`doctor`: check this machine and this installation."""
