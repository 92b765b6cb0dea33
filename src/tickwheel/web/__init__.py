"""The JSON API: parse, call, render. What it means is the scheduler's business."""
