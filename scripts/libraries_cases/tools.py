"""Tools, clients of services, and objects that processes share."""

from __future__ import annotations

import logging
import multiprocessing
from multiprocessing import shared_memory
from pathlib import Path
from typing import Any

import numpy as np

from libraries_cases.arrays import table
from libraries_cases.case import Trial, case, kept_only, refused, refused_with, works

CREATE_IN_SETUP = "create it in `setup=`"


@case("logging", "", "`Logger`", works)
def logging_logger(place: Path) -> Trial:
    return kept_only([logging.getLogger("rows")])


@case("Loguru", "loguru", "`logger`", works)
def loguru_logger(place: Path) -> Trial:
    from loguru import logger

    return kept_only([logger])


@case("structlog", "structlog", "logger", works)
def structlog_logger(place: Path) -> Trial:
    import structlog

    return kept_only([structlog.get_logger()])


@case(
    "tqdm",
    "tqdm",
    "progress bar",
    refused_with("Cannot send this to the workers|could not load the function"),
    "show progress in the training loop",
)
def tqdm_bar(place: Path) -> Trial:
    import tqdm

    return kept_only([tqdm.tqdm(total=24, disable=False)])


@case("Requests", "requests", "`Session`", works)
def requests_session(place: Path) -> Trial:
    import requests

    return kept_only([requests.Session()])


@case("HTTPX", "httpx", "`Client`", refused, CREATE_IN_SETUP)
def httpx_client(place: Path) -> Trial:
    import httpx

    return kept_only([httpx.Client()])


@case("boto3", "boto3", "`Session`", works)
def boto3_session(place: Path) -> Trial:
    import boto3

    return kept_only([boto3.Session(region_name="us-east-1")])


@case("boto3", "boto3", "client", refused, CREATE_IN_SETUP)
def boto3_client(place: Path) -> Trial:
    import boto3

    return kept_only([boto3.Session(region_name="us-east-1").client("s3")])


@case("PyMongo", "pymongo", "`MongoClient`", refused, CREATE_IN_SETUP)
def pymongo_client(place: Path) -> Trial:
    import pymongo

    return kept_only([pymongo.MongoClient(connect=False)])


@case("redis", "redis", "`Redis`", refused, CREATE_IN_SETUP)
def redis_client(place: Path) -> Trial:
    import redis

    return kept_only([redis.Redis()])


@case("multiprocessing", "", "`SharedMemory`", works)
def shared_memory_block(place: Path) -> Trial:
    rows = table()
    block = shared_memory.SharedMemory(create=True, size=rows.nbytes)
    np.ndarray(rows.shape, rows.dtype, buffer=block.buf)[:] = rows

    def read(item: int) -> np.ndarray[Any, Any]:
        return np.ndarray(rows.shape, rows.dtype, buffer=block.buf)[item].copy()

    return Trial(read)


@case(
    "multiprocessing",
    "",
    "`Lock`, `Value`, `Array`, `Queue`, `Event`",
    refused_with("Cannot send this to the workers: .*(Manager|SharedMemory)"),
    "the proxy of a `Manager`, or `SharedMemory`",
)
def multiprocessing_value(place: Path) -> Trial:
    counter = multiprocessing.Value("i", 7)
    others = [
        multiprocessing.Lock(),
        multiprocessing.Array("i", 3),
        multiprocessing.Queue(),
        multiprocessing.Event(),
    ]
    return Trial(lambda item: item + counter.value, alike=others)


@case("multiprocessing", "", "proxies of a `Manager`", works)
def multiprocessing_manager(place: Path) -> Trial:
    manager = multiprocessing.Manager()
    MANAGERS.append(manager)
    shared = manager.dict({item: item / 7 for item in range(24)})
    return Trial(lambda item: shared[item])


MANAGERS: list[Any] = []  # a manager ends when nothing refers to it
