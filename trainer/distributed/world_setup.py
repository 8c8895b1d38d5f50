"""Create the world of a rank from its recipe."""

from trainer.devices import health
from trainer.devices.assignment import assign_devices, number_devices
from trainer.distributed.world import World
from trainer.processes.rank import read_place
from trainer.processes.resources import choose_threads, count_requested_cuda
from trainer.recipe import Recipe


def create_world(recipe: Recipe) -> World:
    """Create the world of this rank: choose its devices and set its number of threads.

    Raises:
        RecipeError: the mode cannot use the devices of the recipe.
        SetupError: torch cannot use a GPU, or copies between GPUs corrupt data.
    """
    import torch

    me = read_place()
    cuda = count_requested_cuda(recipe)
    assigned = assign_devices(recipe, me.local_size, cuda, me.size // me.local_size)
    drives = tuple(map(torch.device, assigned[me.local_rank]))
    device = drives[0]
    threads = choose_threads(recipe, me.local_size)
    torch.set_num_threads(threads)
    if device.type == "cuda":
        for card in dict.fromkeys(drives):
            health.check_card(card, cuda)
        torch.cuda.set_device(device)
        # Wrong copies between GPUs would corrupt training without an error.
        health.check_copies(health.list_copy_pairs(drives))
    shared = device.type == "cuda" and len(set(assigned)) < len(assigned)
    world = World(me, device, threads, (), drives, shared)
    if len(drives) == 1:
        world.devices = (world.name,)
    else:
        world.devices = tuple(number_devices(drives))
    return world
