"""What happened when: pipelines and their bubbles, replay, timelines as Chrome traces and pictures. No torch."""
