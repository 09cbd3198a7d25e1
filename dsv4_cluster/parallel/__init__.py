"""Process groups: which rank this is and how ranks talk."""
