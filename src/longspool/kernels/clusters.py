"""Clusters of keys, in torch: how indexes by clusters are made and asked."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize


def assign(k: Tensor, centroid: Tensor) -> Tensor:
    """The nearest of the centroids [C, D] by cosine for each key of k [T, D], int64 [T]."""
    return (k @ normalize(centroid, dim=1).T).argmax(1)


def means(x: Tensor, label: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The mean of each cluster's members [count, D], 0 where it has none, and how many it has, int64 [count]."""
    size = torch.bincount(label, minlength=count)
    return x.new_zeros(count, x.shape[1]).index_add_(0, label, x) / size.clamp_min(1)[:, None], size


def spherical(k: Tensor, start: Tensor, rounds: int) -> Tensor:
    """Centroids [C, D] after `rounds` of k-means by cosine over k [T, D] from `start`; one that loses all its keys stays where it is."""
    centroid = start
    for _ in range(rounds):
        mean, size = means(k, assign(k, centroid), len(start))
        centroid = torch.where(size[:, None] > 0, mean, centroid)
    return centroid


def recall(rank: Tensor, size: Tensor, order: Tensor, take: Tensor) -> Tensor:
    """The first take[s] tokens of row s when its clusters are emptied one after another as rank int64 [S, C] says; int64 [S, most], -1 past
    the end. size int64 [S, C]; order int64 [S, M] lists the tokens of cluster 0, then of cluster 1 and so on."""
    sizes, starts = size.gather(1, rank), (size.cumsum(1) - size).gather(1, rank)
    ends = sizes.cumsum(1)
    take = torch.minimum(take, ends[:, -1])
    j = torch.arange(int(take.max()), device=rank.device).expand(len(rank), -1).contiguous()
    at = torch.searchsorted(ends, j, right=True).clamp_max(rank.shape[1] - 1)
    where = (starts - ends + sizes).gather(1, at) + j
    return torch.where(j < take[:, None], order.gather(1, where.clamp(0, order.shape[1] - 1)), -1)
