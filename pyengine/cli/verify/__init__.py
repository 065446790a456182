"""`verify`: compare the same few steps on several world sizes, bit for bit."""
