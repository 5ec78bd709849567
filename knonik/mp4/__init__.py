"""Container headers: which packets a video file holds, where they lie and when they are shown."""
