"""What a worker computes with: model, data, schedule, executor, weight versions, links, layer state."""
