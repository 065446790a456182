"""`verify`: the same few steps on several world sizes, compared bit by bit."""
