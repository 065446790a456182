"""What the Accelerate loop cannot honour, by name, and what to do in its place."""

UNEVEN = (
    "prepare: got a loader with even_batches=False, and this loop ends with its own rank's batches, where "
    "others may still wait for it; leave even_batches True, which pads, or prepare the loader by your own "
    "Accelerator and loop over `for window in accelerator.sync.windows(loader)`, in which ranks that have "
    "run out go on until all have"
)


_PREPARED_ALONE = "what it returns would step without this model's windows; give its argument to prepare"
REFUSED = {
    "join_uneven_inputs": "windows need it not; ranks with different numbers of batches: `for window in "
    "accelerator.sync.windows(loader)`",
    "trigger_sync_in_backward": "windows need it not; several forwards before a backward need nothing",
    "no_sync": "gradients travel in a window's last backward only; leave it out",
    "lomo_backward": "it steps inside the backward, where no window has ended; choose another optimizer",
    "prepare_optimizer": _PREPARED_ALONE,
    "prepare_scheduler": _PREPARED_ALONE,
}
