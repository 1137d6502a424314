"""The parts with which a worker computes: model, data, schedule, executor, weight versions, links, layer state."""
