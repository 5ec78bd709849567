"""From compressed pictures to arrays: decoding, colours, depth maps, images, encoding."""
