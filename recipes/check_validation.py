"""What validation during training needs, and held-out episodes that nothing would look at."""

from recipes.schema import Recipe


def validation_problems(recipe: Recipe) -> list[str]:
    """Problems of the `validation` section with itself and with the episodes that are held out."""
    settings = recipe.validation
    if settings is None:
        return []
    problems = []
    if not recipe.data.validation and recipe.data.validation_episodes is None:
        problems.append(
            "validation: no episode is held out; give data.validation=0.05 or data.validation_episodes, or "
            "validation=null"
        )
    for name, least in (("every_n_steps", 1), ("batches", 0), ("open_loop_episodes", 0)):
        if getattr(settings, name) < least:
            problems.append(f"validation.{name}: {getattr(settings, name)} is less than {least}")
    if not settings.batches and not settings.open_loop_episodes:
        problems.append(
            "validation.batches: 0, and no open_loop_episodes either: nothing is measured; give one of them"
        )
    stride = settings.open_loop_stride
    if stride is not None and not 1 <= stride <= recipe.data.horizon:
        problems.append(f"validation.open_loop_stride: {stride} is not in 1 to data.horizon = {recipe.data.horizon}")
    if stride is not None and not settings.open_loop_episodes:
        problems.append("validation.open_loop_stride: has no effect with validation.open_loop_episodes=0")
    if recipe.run.stage != "policy":
        problems.append(f"validation: a {recipe.run.stage} stage has none; give validation=null")
    return problems
