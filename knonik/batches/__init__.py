"""From plans to batches: the threads, the memory and what is kept between batches."""
