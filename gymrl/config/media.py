"""Which images are taken, and from where."""

from __future__ import annotations

from typing import Literal

from gymrl.settings import Config, require


class MediaConfig(Config, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where images may come from, and how large they may be.

    Nothing is fetched and no file is read unless it is asked for here.

    Attributes:
        schemes: What a source may begin with: ``data``, ``http``, ``https``, ``file``.
        allowed_hosts: Hosts that may be fetched from, by name or address; ``*.example.com`` stands
            for every host below that name. Redirects must stay among them.
        private_hosts: Those of `allowed_hosts` that may be at a private or loopback address.
        allowed_roots: Directories that files may lie in, after links are resolved.
        max_image_bytes: Of one image, encoded.
        max_image_pixels: Of one image, width times height, checked before it is decoded.
        max_images_per_row: Of one attempt, prompt and tools together.
        fetch_timeout_s: Deadline of one download, redirects included.
        max_redirects: Of one download.
    """

    schemes: tuple[Literal["data", "http", "https", "file"], ...] = ("data",)
    allowed_hosts: tuple[str, ...] = ()
    private_hosts: tuple[str, ...] = ()
    allowed_roots: tuple[str, ...] = ()
    max_image_bytes: int = 20 << 20
    max_image_pixels: int = 40_000_000
    max_images_per_row: int = 64
    fetch_timeout_s: float = 20.0
    max_redirects: int = 3

    def __post_init__(self) -> None:
        fetches = "http" in self.schemes or "https" in self.schemes
        require(
            fetches == bool(self.allowed_hosts),
            "media.allowed_hosts",
            self.allowed_hosts,
            "name the hosts that images may be fetched from together with http or https in schemes",
        )
        require(
            ("file" in self.schemes) == bool(self.allowed_roots),
            "media.allowed_roots",
            self.allowed_roots,
            "name the directories that images may be read from together with file in schemes",
        )
        require(
            set(self.private_hosts) <= set(self.allowed_hosts),
            "media.private_hosts",
            self.private_hosts,
            "each must be one of allowed_hosts",
        )
        # Above it Pillow warns and then refuses by itself.
        require(
            0 < self.max_image_pixels <= 89_478_485,
            "media.max_image_pixels",
            self.max_image_pixels,
            "must be positive and at most 89478485",
        )
        for setting in ("max_image_bytes", "max_images_per_row", "fetch_timeout_s"):
            value = getattr(self, setting)
            require(value > 0, f"media.{setting}", value, "must be positive")
        require(
            self.max_redirects >= 0, "media.max_redirects", self.max_redirects, "must be 0 or more"
        )
