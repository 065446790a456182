"""DDP: its communication hook, and a DDP whose gradients the engine owns."""
