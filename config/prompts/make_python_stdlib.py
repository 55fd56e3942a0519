# SPDX-License-Identifier: Apache-2.0
"""Run: python config/prompts/make_python_stdlib.py [--output FILE]

Writes python_stdlib.jsonl: prompts about Python's standard library of five kinds (explain, write,
compare, debug, when to use), one chat per line;
`conversation` is equal for prompts on one subject. They are the questions a target model answers when
Pilotfish collects text to train and measure a draft model on, so they read like an engineer's own.

The subjects are the literal lists below, not what the running interpreter contains, and the only random
calls are `Random(seed).random()`, whose sequence Python promises to keep, so the same bytes come out on
every Python 3.11 or newer.
"""

import argparse
import hashlib
import json
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

SEED = 20240611
T = TypeVar("T")
Prompt = tuple[str, str]  # topic, text

# "module: names"; names of builtins are written without a module.
FUNCTIONS = """
builtins: enumerate zip map filter sorted reversed any all isinstance issubclass getattr setattr vars
  iter next divmod round hash id format ord repr open sum print str.partition str.split str.join
  str.removeprefix str.translate str.casefold str.format_map str.splitlines str.encode bytes.hex
  int.from_bytes int.bit_length dict.setdefault dict.fromkeys dict.update list.sort list.extend
  set.symmetric_difference set.discard
collections: namedtuple Counter.most_common deque.rotate deque.appendleft OrderedDict.move_to_end
itertools: chain chain.from_iterable groupby product permutations combinations accumulate islice
  zip_longest takewhile dropwhile starmap cycle repeat count tee compress filterfalse pairwise
functools: reduce partial lru_cache cache wraps singledispatch cached_property total_ordering cmp_to_key
operator: itemgetter attrgetter methodcaller
os: walk scandir listdir makedirs environ.get getenv replace stat urandom
os.path: join exists basename splitext abspath expanduser realpath relpath commonpath
pathlib: Path.glob Path.rglob Path.mkdir Path.read_text Path.resolve Path.iterdir Path.with_suffix
  Path.relative_to Path.unlink
shutil: copy copy2 copytree rmtree move which make_archive unpack_archive
tempfile: mkdtemp mkstemp
glob: glob
fnmatch: fnmatch filter translate
json: dumps loads
csv: reader writer
pickle: dumps loads
re: compile search fullmatch findall finditer sub split escape
string: Template.substitute Template.safe_substitute
textwrap: dedent fill indent shorten wrap
difflib: get_close_matches unified_diff
unicodedata: normalize category
datetime: datetime.now datetime.strptime datetime.strftime datetime.fromisoformat datetime.astimezone
  datetime.combine datetime.replace timedelta.total_seconds
time: sleep monotonic perf_counter strftime process_time
calendar: monthrange isleap month
math: isclose gcd ceil hypot factorial comb fsum prod isnan
statistics: median stdev mode quantiles correlation
random: choice choices sample shuffle seed gauss randrange
secrets: token_hex token_urlsafe compare_digest
hashlib: sha256 pbkdf2_hmac blake2b
hmac: new
base64: b64encode b64decode urlsafe_b64encode
binascii: hexlify crc32
struct: pack unpack calcsize
zlib: compress
gzip: open compress
zipfile: ZipFile.extractall ZipFile.writestr
tarfile: open
bisect: bisect_left insort
heapq: heappush heapify nlargest nsmallest merge
copy: copy deepcopy
pprint: pprint
contextlib: contextmanager suppress closing redirect_stdout nullcontext
dataclasses: dataclass field asdict replace
typing: cast get_type_hints overload
abc: abstractmethod
enum: auto unique
inspect: signature getsource getmembers
logging: basicConfig getLogger exception
logging.config: dictConfig
argparse: ArgumentParser.add_argument ArgumentParser.parse_args ArgumentParser.add_subparsers
subprocess: run check_output Popen.communicate
sys: getsizeof setrecursionlimit intern
threading: Thread.join Lock.acquire Event.wait local
queue: Queue.get Queue.put Queue.task_done
multiprocessing: Pool.map get_context
concurrent.futures: as_completed wait Executor.submit
asyncio: run gather create_task wait_for to_thread run_coroutine_threadsafe as_completed shield
  create_subprocess_exec
socket: create_connection getaddrinfo socketpair
select: select
selectors: DefaultSelector
ssl: create_default_context
urllib.parse: urlparse urlencode quote urljoin parse_qs
urllib.request: urlopen
html: escape
xml.etree.ElementTree: parse fromstring iterparse tostring
sqlite3: connect Cursor.executemany Connection.commit
unittest: main skipIf
unittest.mock: patch patch.object
doctest: testmod
timeit: timeit
cProfile: run
traceback: print_exc format_exc extract_tb
warnings: filterwarnings catch_warnings
gc: collect
weakref: ref finalize
importlib: import_module
importlib.resources: files
importlib.metadata: version
ast: literal_eval walk
dis: dis
tokenize: generate_tokens
signal: signal alarm
atexit: register
shlex: split join
getpass: getpass
platform: system
locale: setlocale
tracemalloc: take_snapshot
uuid: uuid4 uuid5
codecs: getincrementaldecoder
mimetypes: guess_type
linecache: getline
stat: S_ISDIR filemode
errno: errorcode
fileinput: input
filecmp: cmp dircmp
colorsys: rgb_to_hsv
keyword: iskeyword
runpy: run_module
pdb: set_trace post_mortem
faulthandler: enable
tomllib: load
"""

CLASSES = """
builtins: bytearray memoryview frozenset slice range property ExceptionGroup KeyError
collections: deque Counter defaultdict OrderedDict ChainMap UserDict
collections.abc: Mapping Iterable Iterator Sequence
pathlib: Path PurePath
tempfile: TemporaryDirectory NamedTemporaryFile SpooledTemporaryFile
csv: DictReader DictWriter Sniffer
json: JSONEncoder JSONDecodeError
configparser: ConfigParser
datetime: datetime date timedelta timezone
decimal: Decimal
fractions: Fraction
statistics: NormalDist
string: Formatter
io: StringIO BytesIO TextIOWrapper
contextlib: ExitStack AsyncExitStack
typing: Protocol TypedDict NamedTuple Generic TypeVar Literal ParamSpec
types: SimpleNamespace MappingProxyType
abc: ABC
enum: Enum IntEnum Flag StrEnum
logging: Logger Formatter LoggerAdapter
logging.handlers: RotatingFileHandler TimedRotatingFileHandler QueueHandler
argparse: ArgumentParser Namespace
subprocess: Popen CompletedProcess CalledProcessError
threading: Lock RLock Event Condition Semaphore Barrier
queue: Queue PriorityQueue SimpleQueue
multiprocessing: Process Pool Pipe Manager
multiprocessing.shared_memory: SharedMemory
concurrent.futures: ThreadPoolExecutor ProcessPoolExecutor Future
contextvars: ContextVar
asyncio: Queue Semaphore Event TaskGroup
socketserver: TCPServer ThreadingMixIn
http.server: SimpleHTTPRequestHandler ThreadingHTTPServer
http.client: HTTPSConnection
http.cookies: SimpleCookie
html.parser: HTMLParser
email.message: EmailMessage
smtplib: SMTP
sqlite3: Row
unittest: TestCase IsolatedAsyncioTestCase
unittest.mock: Mock MagicMock AsyncMock
weakref: WeakValueDictionary WeakKeyDictionary WeakSet
array: array
graphlib: TopologicalSorter
difflib: SequenceMatcher
ast: NodeVisitor NodeTransformer
zoneinfo: ZoneInfo
cmd: Cmd
random: SystemRandom
mmap: mmap
ctypes: Structure
"""

MODULES = """
array ast atexit bisect calendar cmath codecs configparser contextlib contextvars cProfile ctypes curses
decimal difflib dis doctest faulthandler fractions gc graphlib hashlib http.server importlib ipaddress
mimetypes mmap multiprocessing operator pickle pkgutil plistlib pprint profile pstats queue reprlib sched
selectors shlex shutil signal site socketserver statistics struct sysconfig tarfile tempfile textwrap
timeit tomllib trace tracemalloc unicodedata urllib.robotparser venv warnings weakref xmlrpc.client
zipapp zipfile
"""

FUNCTION_WORDINGS = (
    "What does {n} do? Give a short example.",
    "Explain {n} with a small example.",
    "How does {n} work in Python?",
    "Show me how to use {n}.",
    "what's {n} for?",
    "explain {n} like I'm new to Python",
    "In two sentences, what is {n} for?",
    "I saw {n} in some code at work. What does it do?",
    "python {n} example",
    "Walk me through a simple use of {n}.",
    "Explain what {n} does and a common mistake people make with it.",
    "quick summary of {n} please",
    "What are some practical uses of {n}?",
    "Describe how {n} behaves, including any edge cases worth knowing.",
    "A teammate asked me what {n} is for. How should I explain it?",
)

CLASS_WORDINGS = (
    "What is {n} in Python?",
    "Explain {n} with a short code example.",
    "What is {n} used for, and how do I use it?",
    "Give a brief overview of {n} and the features people use most.",
    "what is {n}, in plain English?",
    "I've never used {n}. Show me the basics.",
    "How does {n} work? Keep it short.",
    "Show a minimal working example of {n}.",
    "What should I know about {n} before I use it in production code?",
    "python {n} basics",
    "Explain the purpose of {n} to someone coming from Java.",
)

MODULE_WORDINGS = (
    "What is the {n} module for?",
    "Give me a short introduction to Python's {n} module.",
    "Explain the main features of the {n} module.",
    "what can I do with the {n} module?",
    "Summarize the {n} module in three sentences.",
    "Show a short example that uses the {n} module and explain it line by line.",
    "Is the {n} module worth learning? What does it offer?",
    "I have to maintain code that imports {n}. What should I know about it?",
    "Describe a real-world task that the {n} module makes easier.",
)

# "tool | task": the task follows "to".
WRITE = """
collections.Counter | count the words in a text file and print the ten most common ones
collections.Counter | report which items two inventories have in common, and how many of each
collections.defaultdict | group a list of (key, value) pairs into a dict of lists
collections.deque | keep only the last n lines of a large file
collections.deque | compute a moving average over a stream of numbers
collections.OrderedDict | build a small LRU cache class
collections.ChainMap | merge default settings, environment variables and command line options
collections.namedtuple | turn rows of a CSV file into records with named fields
itertools.groupby | group log entries by date
itertools.islice | split any iterable into chunks of a given size
itertools.product | list every combination of sizes, colors and materials for a product catalog
itertools.accumulate | compute the running total of a list of daily sales
itertools.combinations | list every possible pair of team members for code reviews
itertools.chain | flatten a list of lists by one level
itertools.pairwise | compute the differences between consecutive readings
itertools.zip_longest | print two lists of different lengths side by side
itertools.cycle | assign tasks to workers in round-robin order
functools.lru_cache | avoid repeating a slow lookup of exchange rates
functools.wraps | create a decorator that logs how long each call takes
functools.wraps | create a decorator that retries a function up to three times on failure
functools.partial | create specialised versions of a logging function
functools.singledispatch | serialize values differently depending on their type
functools.reduce | compose a list of functions into one function
functools.cached_property | load a large file only the first time an attribute is accessed
functools.total_ordering | make a Version class whose instances can be sorted
operator.itemgetter | sort a list of dicts by two keys
os.walk | find the ten largest files under a directory
os.scandir | compute the total size of a directory tree
os.environ | read required settings from environment variables and fail clearly if one is missing
os.replace | write a file atomically so that readers never see a half-written version
pathlib | rename all .jpeg files in a folder to .jpg
pathlib | list every Python file in a project, sorted by modification time
pathlib | count the lines of code in a source tree, ignoring blank lines
pathlib | delete log files that are more than thirty days old
shutil | back up a directory to a dated folder
shutil.make_archive | zip a folder and move the archive to a backup directory
shutil.disk_usage | warn when a disk is more than 90 percent full
shutil.which | check that all required command line tools are installed
tempfile | run a block of code inside a temporary directory that is removed afterwards
tempfile.NamedTemporaryFile | write some text to a temporary file and return its path
glob | merge all CSV files in a folder into one file
fnmatch | filter a list of file names by several wildcard patterns
filecmp | report which files differ between two directories
fileinput | replace a word in several files in place
json | load a config file and fall back to defaults for missing keys
json | pretty-print a JSON file with sorted keys
json.JSONEncoder | serialize datetime and Decimal values to JSON
json | convert a JSON Lines file to a list of dicts, skipping invalid lines
csv.DictReader | sum one column of a CSV file, grouped by another column
csv.DictWriter | write a list of dicts to a CSV file with a header row
csv | convert a tab-separated file to a comma-separated one
csv | remove duplicate rows from a CSV file while keeping the original order
configparser | read a database section from an INI file
configparser | update one option in an INI file and save it
tomllib | read the project name and version from pyproject.toml
pickle | cache the result of a slow function on disk
shelve | store a simple address book on disk
sqlite3 | create a table of users and insert several rows in one transaction
sqlite3 | build a simple key-value store backed by a database file
sqlite3 | run a parameterized query and return the rows as dicts
sqlite3 | export a table to a CSV file
re | extract all email addresses from a block of text
re | parse an Apache access log line into a dict
re | validate that a string looks like a hex color code
re.sub | convert camelCase names to snake_case
re.sub | mask all but the last four digits of card numbers in a text
re.finditer | list every TODO comment in a source file with its line number
string.Template | fill in a mail merge letter from a dict
string | check a password for upper case, lower case, digits and punctuation
textwrap | format a long paragraph to 72 columns with a hanging indent
difflib | show a unified diff of two text files
difflib.get_close_matches | suggest the nearest command when the user mistypes one
unicodedata | strip accents from a string
html | escape user input before putting it on a web page
html.parser | collect all links from an HTML document
xml.etree.ElementTree | read titles and links from an RSS feed
xml.etree.ElementTree | build a small XML document from a list of dicts
datetime | compute a person's age from a date of birth
datetime | list all dates between two dates
datetime | parse timestamps in ISO 8601 format and sort them
datetime | count the working days between two dates, ignoring holidays
datetime | format a number of seconds as hours, minutes and seconds
zoneinfo | convert a meeting time from New York to Tokyo
zoneinfo | print the current time in five different cities
calendar | find the last Friday of a given month
calendar | print a calendar for the current month
time.perf_counter | measure how long a block of code takes with a context manager
time.monotonic | implement a simple rate limiter
sched | run a function every ten seconds
math | find the angle in degrees between two vectors
math | compute the great-circle distance between two points on Earth
math.isclose | compare two lists of floats within a tolerance
statistics | print the mean, median and standard deviation of numbers in a file
statistics.quantiles | find outliers in a list of response times
decimal | add up prices without rounding errors
decimal | split a restaurant bill evenly to the cent
fractions | turn a repeating ratio such as 0.75 into its simplest fraction
random | shuffle a deck of cards and deal five to each player
random.choices | simulate rolling a weighted die 1,000 times
random.sample | pick three different winners from a list of names
random | split a dataset into train and test parts with a fixed seed
secrets | generate a strong random password
secrets | create a password reset token that is safe in a URL
hashlib | compute the SHA-256 checksum of a large file in chunks
hashlib | find duplicate files in a directory by their contents
hashlib.scrypt | hash a password with a random salt and verify it later
hmac | sign a message with a secret key and verify the signature
base64 | embed a small PNG image in an HTML page as a data URI
struct | read the width and height from a BMP file header
struct | pack a message with a length prefix for sending over a socket
zlib | compress a string and report the compression ratio
gzip | count the lines of a gzipped log file without unpacking it to disk
zipfile | list the contents of a zip archive with file sizes
zipfile | extract only the .txt files from a zip archive
tarfile | create a .tar.gz archive of a directory, skipping hidden files
bisect | map a numeric score to a letter grade
bisect | keep a list sorted while new values arrive
heapq | merge several sorted files into one sorted file
heapq | implement a priority queue of tasks
heapq.nlargest | find the k slowest requests in a list of log records
array | store a million integers compactly and compute their sum
copy.deepcopy | duplicate a nested configuration dict before changing it
pprint | print a deeply nested dict in a readable way
contextlib.contextmanager | change the working directory temporarily
contextlib.suppress | delete a file if it exists and do nothing otherwise
contextlib.ExitStack | open a variable number of files and close them all safely
contextlib.redirect_stdout | capture everything that a function prints
dataclasses | define an immutable Point type that can be used as a dict key
dataclasses | define an Order class with a computed total and a default list of items
dataclasses.asdict | save a list of simple objects to a JSON file
typing.Protocol | define an interface for objects that have a close method
typing.TypedDict | describe the shape of a JSON response from a weather API
types.SimpleNamespace | access the keys of a dict as attributes
abc | define an abstract Shape class with two concrete subclasses
enum.Enum | model the states of an order and the allowed transitions
enum.Flag | represent read, write and execute permissions
inspect.signature | print the parameters and defaults of any function
logging | set up a logger that writes to both the console and a file
logging.handlers | keep log files under 1 MB each with five backups
logging | log uncaught exceptions with a full traceback
logging.Formatter | output log records as JSON
argparse | build a command line tool that takes an input file and an optional --verbose flag
argparse | create a CLI with add and list subcommands
argparse | accept a date in YYYY-MM-DD format as a command line argument
subprocess | run a shell command with a timeout and return its output
subprocess | get the current git branch name
subprocess.Popen | print the output of a long-running command line by line as it arrives
shlex | split a command line string into arguments the way a shell would
signal | shut down cleanly when the user presses Ctrl+C
atexit | save unsaved state when the program exits
sys.stdin | read numbers from standard input and print their sum
sys | print the memory size of several built-in objects
platform | print the operating system, machine type and Python version
getpass | ask for a user name and a password without echoing the password
threading.Thread | download several URLs in parallel
threading.Lock | make a counter that is safe to increment from many threads
threading.Event | stop a background worker thread cleanly
threading.Timer | call a function once after a delay
queue.Queue | implement a producer and consumer with two threads
multiprocessing.Pool | compute the squares of a large list of numbers on all cores
multiprocessing.Queue | pass results from a worker process back to the parent
concurrent.futures | check the status of many URLs concurrently and report failures
ThreadPoolExecutor | read many small files in parallel and return their contents in order
ProcessPoolExecutor | count primes in several ranges in parallel
asyncio | run three coroutines concurrently and collect their results
asyncio.Semaphore | limit the number of concurrent requests to five
asyncio.Queue | build a pipeline of one producer and three consumers
asyncio.wait_for | cancel a coroutine that takes longer than two seconds
asyncio | write a TCP echo server
asyncio.to_thread | call a blocking function without freezing the event loop
contextvars | attach a request id to every log message in async code
socket | check whether a TCP port is open on a host
socket | send a UDP message and wait for a reply
selectors | handle several client connections in a single thread
socketserver | write a server that returns each line in upper case
http.server | serve JSON from a simple endpoint on localhost
http.client | send a GET request and print the response headers
urllib.request | download a file and show the progress
urllib.request | send JSON in a POST request and decode the reply
urllib.parse | add query parameters to a URL that may already have some
urllib.parse | extract the domain name from a list of URLs
ipaddress | check whether an IP address belongs to a given network
ipaddress | list all usable hosts in a /28 network
email.message | build an email with a plain text body and an attachment
smtplib | send a plain text email through an SMTP server with TLS
mimetypes | guess the content type of every file in a folder
uuid | generate a unique file name for each upload
unittest | test a function that should raise ValueError for negative input
unittest.mock | test code that calls an external API without making network requests
doctest | add tested examples to the docstring of a temperature conversion function
timeit | compare the speed of string concatenation and str.join
cProfile | profile a slow function and print the ten slowest calls
tracemalloc | find the lines of code that allocate the most memory
traceback | log an exception as a single string without stopping the program
warnings | mark a function as deprecated
weakref | build a cache whose entries disappear when nobody uses them
importlib | load all plugins found in a package at run time
importlib.metadata | print the version of every installed package
ast | list the functions defined in a Python source file
ast.literal_eval | safely parse a Python list written as a string
graphlib | order build steps so that dependencies come first
cmd | build a small interactive shell with help texts
linecache | print a given line of a file together with its neighbors
io.StringIO | build a CSV string in memory
io.BytesIO | create a zip archive in memory and return its bytes
codecs | convert a file from Latin-1 to UTF-8
locale | format a number with the thousands separators of the user's region
colorsys | generate n evenly spaced colors as hex strings
"""

WRITE_WORDINGS = (
    "Write a Python function to {t}, using {m}.",
    "Using {m}, write code to {t}.",
    "Write a short function to {t}. Use {m}.",
    "Give me a code snippet to {t}. It should use {m}.",
    "I need to {t}. How would you do it with {m}?",
    "{t^}. Use {m}.",
    "{t^}, using {m}. Add comments.",
    "With {m}, how can I {t}?",
    "Please write a small script to {t}. I'd like to use {m}.",
    "Show me how to use {m} to {t}.",
)

OPEN_WRITE_WORDINGS = (
    "Write a Python function to {t}. Standard library only.",
    "In Python, how do I {t}?",
    "Without third-party packages, what is a clean way to {t}?",
    "write python code to {t}",
    "Implement this in Python with type hints and a docstring: {t}.",
    "What is the most Pythonic way to {t}?",
    "Can you write a short Python example to {t}?",
    "In Python, {t}. Keep the code under 30 lines.",
    "We need a helper to {t}. Please write it and explain it briefly.",
    "Python script to {t}, no external dependencies",
)

# "a | b"; a side without a space is code.
COMPARE = """
functools.lru_cache | functools.cache
functools.cached_property | property
functools.partial | a lambda
functools.reduce | itertools.accumulate
functools.singledispatch | a chain of `isinstance` checks
collections.namedtuple | typing.NamedTuple
collections.namedtuple | dataclasses.dataclass
collections.defaultdict | dict.setdefault
collections.deque | list
collections.deque | queue.Queue
collections.Counter | collections.defaultdict
collections.OrderedDict | dict
collections.ChainMap | dict.update
collections.UserDict | subclassing `dict` directly
itertools.chain | itertools.chain.from_iterable
itertools.permutations | itertools.combinations
itertools.combinations | itertools.combinations_with_replacement
itertools.zip_longest | zip
itertools.islice | list slicing
itertools.product | nested for loops
itertools.starmap | map
itertools.takewhile | filter
itertools.tee | list
operator.itemgetter | operator.attrgetter
operator.itemgetter | a lambda as a sort key
os.path.join | pathlib.Path
os.listdir | os.scandir
os.walk | pathlib.Path.rglob
os.rename | os.replace
os.rename | shutil.move
os.mkdir | os.makedirs
os.remove | pathlib.Path.unlink
os.system | subprocess.run
os.environ | os.getenv
os.path.abspath | os.path.realpath
os.path.exists | os.path.isfile
os.rmdir | shutil.rmtree
os.urandom | secrets.token_bytes
os.fork | multiprocessing.Process
os.cpu_count | multiprocessing.cpu_count
os._exit | sys.exit
glob.glob | pathlib.Path.glob
glob.glob | glob.iglob
glob | fnmatch
shutil.copy | shutil.copy2
shutil.copyfile | shutil.copy
tempfile.mkstemp | tempfile.NamedTemporaryFile
tempfile.TemporaryDirectory | tempfile.mkdtemp
pathlib.Path | pathlib.PurePath
json.dump | json.dumps
json.load | json.loads
json | pickle
pickle | shelve
pickle | marshal
csv.reader | csv.DictReader
csv.writer | csv.DictWriter
configparser | tomllib
re.match | re.search
re.match | re.fullmatch
re.findall | re.finditer
re.sub | str.replace
re.split | str.split
greedy matching in `re` | non-greedy matching in `re`
string.Template | f-strings
str.format | f-strings
str.isdigit | str.isdecimal
str.find | str.index
str.lower | str.casefold
str.strip | str.removeprefix
str.split | str.partition
str.join | the + operator for building strings
textwrap.wrap | textwrap.fill
textwrap.shorten | slicing a string
datetime.datetime.now | datetime.datetime.utcnow
datetime.date | datetime.datetime
datetime.timezone | zoneinfo.ZoneInfo
datetime.datetime.strptime | datetime.datetime.fromisoformat
naive datetimes | aware datetimes
datetime.strftime | datetime.strptime
time.time | time.perf_counter
time.monotonic | time.time
time.perf_counter | time.process_time
time.sleep | asyncio.sleep
time.sleep | threading.Event.wait
timeit | cProfile
math.floor | int
math.sqrt | math.isqrt
math.fsum | sum
math.isclose | the == operator for floats
math.comb | math.perm
math | cmath
decimal.Decimal | float
decimal.Decimal | fractions.Fraction
statistics.mean | statistics.fmean
statistics.stdev | statistics.pstdev
statistics.median | statistics.mean
random.choice | random.choices
random.sample | random.choices
random.shuffle | random.sample
random.randint | random.randrange
random | secrets
hashlib.md5 | hashlib.sha256
hashlib.sha256 | hmac.new
hmac.compare_digest | the == operator for comparing digests
base64.b64encode | base64.urlsafe_b64encode
struct.pack | int.to_bytes
struct | ctypes.Structure
gzip | zlib
gzip | lzma
zipfile | tarfile
array.array | list
bytes | bytearray
bytes | memoryview
bisect.bisect_left | bisect.bisect_right
bisect.insort | list.sort
heapq | queue.PriorityQueue
heapq.nlargest | sorted
heapq.merge | itertools.chain
sorted | list.sort
copy.copy | copy.deepcopy
dataclasses.replace | copy.copy
print | pprint.pprint
print | logging.info
contextlib.suppress | try/except with `pass`
contextlib.contextmanager | a class with `__enter__` and `__exit__`
contextlib.closing | a plain `with` statement
dataclasses.dataclass | typing.TypedDict
dataclasses.field(default=...) | dataclasses.field(default_factory=...)
typing.Protocol | abc.ABC
typing.Any | object
typing.Optional | typing.Union
typing.Literal | enum.Enum
types.SimpleNamespace | dict
types.MappingProxyType | frozenset
enum.Enum | enum.IntEnum
enum.IntEnum | enum.IntFlag
logging.error | logging.exception
logging | warnings
logging.basicConfig | logging.config.dictConfig
RotatingFileHandler | TimedRotatingFileHandler
argparse | getopt
argparse | sys.argv
subprocess.run | subprocess.Popen
subprocess.run | subprocess.check_output
`shell=True` in `subprocess` | passing a list of arguments
Popen.wait | Popen.communicate
sys.exit | raising `SystemExit`
sys.getsizeof | tracemalloc
threading.Lock | threading.RLock
threading.Event | threading.Condition
threading.Semaphore | threading.BoundedSemaphore
threading.local | contextvars.ContextVar
threading.Thread | multiprocessing.Process
queue.Queue | queue.SimpleQueue
queue.Queue | multiprocessing.Queue
queue.LifoQueue | queue.PriorityQueue
queue.Queue | asyncio.Queue
multiprocessing.Pool | ProcessPoolExecutor
Pool.map | Pool.imap
multiprocessing.Pipe | multiprocessing.Queue
ThreadPoolExecutor | ProcessPoolExecutor
Executor.map | Executor.submit
ThreadPoolExecutor | asyncio
asyncio.gather | asyncio.wait
asyncio.gather | asyncio.TaskGroup
asyncio.create_task | awaiting a coroutine directly
asyncio.wait_for | asyncio.timeout
asyncio.to_thread | loop.run_in_executor
select.select | selectors
socket.send | socket.sendall
urllib.request | http.client
urllib.parse.quote | urllib.parse.quote_plus
urllib.parse.urlparse | urllib.parse.urlsplit
xml.etree.ElementTree | xml.dom.minidom
ElementTree.parse | ElementTree.iterparse
Cursor.execute | Cursor.executemany
sqlite3 | shelve
unittest | doctest
Mock | MagicMock
unittest.mock.patch | unittest.mock.patch.object
TestCase.setUp | TestCase.setUpClass
weakref.ref | weakref.proxy
uuid.uuid1 | uuid.uuid4
uuid.uuid3 | uuid.uuid5
importlib.import_module | __import__
ast.literal_eval | eval
isinstance | type
getattr | vars
staticmethod | classmethod
dict.get | indexing a dict with square brackets
list.append | list.extend
list.remove | list.pop
set.remove | set.discard
set | frozenset
map | a list comprehension
any | all
range | enumerate
repr | str
io.StringIO | io.BytesIO
text mode in `open` | binary mode in `open`
iter | next
signal.SIGINT | signal.SIGTERM
"""

COMPARE_WORDINGS = (
    "What is the difference between {a} and {b}?",
    "{a} vs {b}: which one should I use?",
    "Compare {a} and {b} with a short example of each.",
    "When would you pick {a} over {b}?",
    "How does {a} differ from {b}?",
    "I keep mixing up {a} and {b}. Can you explain the difference?",
    "Do {a} and {b} do the same thing in Python?",
    "{a} or {b}? Give me the short version.",
    "Our code uses both {a} and {b}. What are the trade-offs?",
    "Explain {a} versus {b} to a junior developer.",
    "Show one case where {a} is a better fit than {b}, and one where it isn't.",
    "When does the choice between {a} and {b} actually matter?",
)

# "name"; a plain question of when to use it.
WHEN = """
collections.deque collections.defaultdict collections.ChainMap collections.Counter collections.namedtuple
collections.OrderedDict collections.UserDict itertools.tee itertools.groupby itertools.islice
itertools.accumulate functools.lru_cache functools.partial functools.singledispatch functools.wraps
functools.cached_property functools.total_ordering operator.attrgetter pathlib.Path os.scandir os.replace
shutil.copytree tempfile.TemporaryDirectory tempfile.SpooledTemporaryFile json.JSONEncoder csv.Sniffer
pickle shelve sqlite3 configparser tomllib re.compile re.fullmatch re.VERBOSE string.Template
textwrap.dedent difflib.SequenceMatcher unicodedata.normalize datetime.timezone.utc zoneinfo.ZoneInfo
time.monotonic calendar decimal.Decimal fractions.Fraction math.fsum statistics.NormalDist
random.SystemRandom secrets hashlib.blake2b hmac base64 struct mmap zlib lzma array.array bisect heapq
copy.deepcopy contextlib.ExitStack contextlib.nullcontext contextlib.suppress dataclasses.field
typing.Protocol typing.TypedDict typing.cast types.MappingProxyType types.SimpleNamespace abc.ABC
enum.Flag enum.StrEnum inspect.signature logging.LoggerAdapter logging.handlers.QueueHandler
argparse.Namespace subprocess.Popen shlex.quote signal.signal atexit.register sys.intern
threading.RLock threading.Condition threading.Barrier threading.local queue.PriorityQueue
multiprocessing.shared_memory multiprocessing.Manager multiprocessing.Pool
concurrent.futures.as_completed asyncio.gather asyncio.shield asyncio.Semaphore asyncio.to_thread
asyncio.TaskGroup contextvars.ContextVar selectors socketserver http.server html.escape
unittest.mock.patch unittest.mock.AsyncMock doctest timeit cProfile tracemalloc warnings.warn
weakref.WeakValueDictionary weakref.finalize gc.collect importlib.reload importlib.resources
ast.NodeTransformer graphlib.TopologicalSorter io.BytesIO memoryview bytearray frozenset slice
"""

WHEN_WORDINGS = (
    "When should I use {n}?",
    "In what situations is {n} the right choice?",
    "What is a good use case for {n}?",
    "when would I actually need {n}?",
    "When is {n} worth it, and when is it overkill?",
    "Give two situations where {n} is useful and one where it isn't.",
    "Why would someone use {n} instead of something simpler?",
    "How do I decide whether to use {n}?",
    "What kind of problem calls for {n}?",
    "Name a real-world example where {n} makes the code better.",
)

# "name | purpose".
SUITED = """
pickle | exchanging data with an untrusted client
pickle | caching intermediate results of a batch job
json | storing configuration files that people edit by hand
shelve | a small web application with several concurrent users
sqlite3 | a desktop application with a few thousand records
sqlite3 | a busy web service with many concurrent writers
csv | reading a spreadsheet export with quoted commas
configparser | settings with nested structure
eval | parsing user input
ast.literal_eval | reading a dict from a text file
re | parsing nested parentheses
re | parsing HTML
html.parser | scraping a few links from a page
xml.etree.ElementTree | parsing a 5 GB XML file
collections.deque | a fixed-size history of recent events
collections.deque | random access by index in a long sequence
collections.Counter | comparing two shopping carts
collections.namedtuple | returning several values from a function
collections.defaultdict | building an adjacency list for a graph
functools.lru_cache | a function that reads from a database
functools.lru_cache | methods of long-lived objects
functools.cached_property | a value that changes over time
functools.reduce | summing a list
itertools.permutations | a list of 15 items
itertools.product | a brute-force search over settings
heapq | keeping the top 100 scores from a stream
bisect | looking up values in a sorted list of a million items
array.array | storing sensor readings
decimal.Decimal | money calculations
float | money calculations
fractions.Fraction | exact recipe scaling
random | generating session tokens
secrets | generating password reset links
hashlib.md5 | storing passwords
hashlib.md5 | detecting accidental file corruption
hashlib.sha256 | checking a downloaded file
hashlib.scrypt | storing passwords
uuid.uuid4 | database primary keys
base64 | hiding a password in a config file
zlib | compressing JSON before sending it over a network
time.time | measuring the duration of an operation
time.sleep | waiting for a thread to finish
datetime.datetime.now | storing timestamps in a database
zoneinfo | scheduling meetings across time zones
threading | CPU-bound work
threading | waiting on many slow network calls
multiprocessing | resizing thousands of images
multiprocessing | many short I/O-bound tasks
asyncio | a chat server with thousands of idle connections
asyncio | heavy number crunching
ThreadPoolExecutor | downloading a few hundred files
ProcessPoolExecutor | parsing large log files
queue.Queue | passing work between threads
queue.Queue | passing work between processes
threading.Timer | a job that runs every hour
sched | running periodic jobs in a long-running service
subprocess | running git commands from a script
os.system | running a command that contains user input
signal.alarm | adding a timeout to a function on Windows
atexit | closing database connections
os.walk | searching a directory tree with millions of files
shutil.rmtree | cleaning up a build directory
tempfile | files that must survive a reboot
pathlib | a script that runs on both Windows and Linux
glob | finding files by extension
logging | a short one-off script
print | debugging a multi-threaded program
warnings | reporting invalid user input
argparse | a script with a single positional argument
argparse | a tool with several subcommands
cmd | an interactive admin console
http.server | serving a website in production
http.server | sharing a folder on a local network
urllib.request | calling a simple REST API
smtplib | sending alert emails from a cron job
socketserver | a small TCP service for testing
unittest.mock | testing code that depends on the current time
doctest | testing a large application
timeit | measuring a function that takes ten minutes
cProfile | finding a slow database query
tracemalloc | finding a memory leak in a web server
gc.collect | freeing memory in a loop
weakref | caching large image objects
copy.deepcopy | copying a list of integers
contextlib.suppress | ignoring every exception in a worker
contextlib.ExitStack | opening a list of files whose length is not known in advance
dataclasses | validating JSON input
dataclasses | plain records with a few fields
typing.TypedDict | dicts decoded from JSON
enum.Enum | a fixed set of status codes
abc.ABC | a plugin interface
types.SimpleNamespace | grouping test fixtures
importlib.reload | picking up code changes in a running server
inspect | building a small dependency injection helper
struct | parsing a binary file format
mmap | searching inside a very large file
io.StringIO | testing a function that writes to a file object
string.Template | templates written by end users
difflib | comparing two versions of a config file
textwrap | formatting help text in a terminal program
statistics | a data set with 50 million values
graphlib | resolving package dependencies
ipaddress | validating addresses in a form
locale | formatting currency in a web server
contextvars | passing a request id through async code
"""

SUITED_WORDINGS = (
    "Should I use {n} for {p}?",
    "Is {n} a good choice for {p}?",
    "Does it make sense to use {n} for {p}? Why or why not?",
    "I'm thinking of using {n} for {p}. Is that a good idea?",
    "A colleague suggested {n} for {p}. Do you agree?",
    "is {n} ok for {p}, or is there something better in the stdlib?",
    "What are the pros and cons of {n} for {p}?",
    "For {p}, would you reach for {n} or something else?",
)

# "=== module | what the user sees", then the snippet.
DEBUG = r"""
=== builtins | The second call returns items from the first call.
def add_item(item, items=[]):
    items.append(item)
    return items
=== builtins | Some of the even numbers are still in the list afterwards.
numbers = [2, 4, 6, 7, 8]
for n in numbers:
    if n % 2 == 0:
        numbers.remove(n)
=== builtins | It prints None instead of the sorted list.
names = ["Mia", "Ben", "Zoe"]
names = names.sort()
print(names)
=== builtins | All three rows change when I set one cell.
grid = [[0] * 3] * 3
grid[0][0] = 1
print(grid)
=== builtins | All functions print 2.
funcs = [lambda: i for i in range(3)]
for f in funcs:
    print(f())
=== builtins | The second loop prints nothing.
squares = map(lambda x: x * x, [1, 2, 3])
for s in squares:
    print(s)
for s in squares:
    print(s)
=== builtins | I get RuntimeError: dictionary changed size during iteration.
stock = {"apple": 0, "pear": 4}
for name in stock:
    if stock[name] == 0:
        del stock[name]
=== builtins | The text is unchanged after the call.
title = "hello world"
title.replace("world", "there")
print(title)
=== builtins | It says TypeError: can only concatenate str (not "int") to str.
age = 41
print("Age: " + age)
=== builtins | Entering 5 prints "too big".
limit = "10"
value = input("Value: ")
if value < limit:
    print("ok")
else:
    print("too big")
=== builtins | UnboundLocalError is raised on the first call.
count = 0

def increment():
    count += 1
    return count
=== builtins | The file is sometimes empty when another program reads it.
f = open("out.txt", "w")
f.write("done")
notify_reader("out.txt")
=== builtins | The prefix removal eats too many letters.
name = "test_tests.py"
print(name.lstrip("test_"))
=== builtins | It fails with AttributeError: 'dict' object has no attribute 'add'.
seen = {}
for word in ["a", "b", "a"]:
    seen.add(word)
=== builtins | The comparison is False although I expect True.
total = 0.1 + 0.2
print(total == 0.3)
=== builtins | The finally block hides my exception.
def load():
    try:
        raise ValueError("bad data")
    finally:
        return None
=== collections | Checking for a key makes the dict grow.
from collections import defaultdict
hits = defaultdict(int)
if hits["home"] == 0:
    print("no hits")
print(len(hits))
=== collections | It raises TypeError: first argument must be callable or None.
from collections import defaultdict
groups = defaultdict([])
groups["a"].append(1)
=== collections | Setting x raises AttributeError: can't set attribute.
from collections import namedtuple
Point = namedtuple("Point", "x y")
p = Point(1, 2)
p.x = 10
=== collections | I want the last 100 values, but the deque keeps the first 100.
from collections import deque
recent = deque()
for value in read_values():
    recent.append(value)
    if len(recent) > 100:
        recent.pop()
=== itertools | The same key appears several times in the output.
from itertools import groupby
words = ["apple", "bat", "avocado", "bear"]
for letter, group in groupby(words, key=lambda w: w[0]):
    print(letter, list(group))
=== itertools | Every group prints as an empty list.
from itertools import groupby
groups = [(k, g) for k, g in groupby("aabbb")]
for k, g in groups:
    print(k, list(g))
=== itertools | The program never finishes.
from itertools import cycle
colors = list(cycle(["red", "green", "blue"]))
print(colors[:5])
=== functools | It raises TypeError: unhashable type: 'list'.
from functools import lru_cache

@lru_cache
def total(values):
    return sum(values)

print(total([1, 2, 3]))
=== functools | The wrapped function's name and docstring are lost.
import time

def timed(func):
    def wrapper(*args, **kwargs):
        start = time.perf_counter()
        result = func(*args, **kwargs)
        print(time.perf_counter() - start)
        return result
    return wrapper
=== functools | Calling greet() fails with 'NoneType' object is not callable.
import functools

def log_calls(func):
    @functools.wraps(func)
    def wrapper(*args, **kwargs):
        print("calling", func.__name__)
        return func(*args, **kwargs)

@log_calls
def greet():
    print("hi")
=== functools | reduce fails on an empty list.
from functools import reduce
prices = []
total = reduce(lambda a, b: a + b, prices)
=== os | FileNotFoundError is raised for every file.
import os
for name in os.listdir("data"):
    print(name, os.path.getsize(name))
=== os.path | The result is "/logs/app.txt" and the first folder is gone.
import os.path
path = os.path.join("project", "/logs", "app.txt")
print(path)
=== os | It raises FileExistsError on the second run.
import os
os.makedirs("build/output")
=== os | It raises TypeError: str expected, not int.
import os
os.environ["PORT"] = 8080
=== pathlib | It says unsupported operand type(s) for +.
from pathlib import Path
base = Path("reports")
target = base + "summary.txt"
=== pathlib | It never finds files in subfolders.
from pathlib import Path
for path in Path("src").glob("*.py"):
    print(path)
=== pathlib | The file is not renamed, but there is no error.
from pathlib import Path
path = Path("notes.txt")
path.with_suffix(".md")
=== shutil | It fails because the destination already exists.
import shutil
shutil.copytree("assets", "backup")
shutil.copytree("assets", "backup")
=== tempfile | The file is gone when I try to open it.
import tempfile

def make_temp():
    with tempfile.NamedTemporaryFile("w") as f:
        f.write("hello")
    return f.name

print(open(make_temp()).read())
=== json | It raises AttributeError: 'str' object has no attribute 'read'.
import json
text = '{"name": "Ada"}'
data = json.load(text)
=== json | JSONDecodeError is raised although the text looks fine to me.
import json
data = json.loads("{'name': 'Ada', 'age': 36}")
=== json | It says Object of type datetime is not JSON serializable.
import json
from datetime import datetime
print(json.dumps({"created": datetime.now()}))
=== json | The lookup by number fails after a round trip.
import json
scores = {1: "gold", 2: "silver"}
restored = json.loads(json.dumps(scores))
print(restored[1])
=== csv | There is a blank line after every row on Windows.
import csv
with open("out.csv", "w") as f:
    writer = csv.writer(f)
    writer.writerow(["name", "age"])
    writer.writerow(["Ada", 36])
=== csv | Each letter ends up in its own column.
import csv
with open("names.csv", "w", newline="") as f:
    writer = csv.writer(f)
    for name in ["Ada", "Grace"]:
        writer.writerow(name)
=== csv | The sum fails with a TypeError.
import csv
total = 0
with open("sales.csv", newline="") as f:
    for row in csv.DictReader(f):
        total += row["amount"]
=== pickle | It raises TypeError: write() argument must be str, not bytes.
import pickle
with open("cache.pkl", "w") as f:
    pickle.dump({"a": 1}, f)
=== configparser | The "debug" setting is always treated as true.
import configparser
config = configparser.ConfigParser()
config.read_string("[app]\ndebug = false")
if config["app"]["debug"]:
    print("debugging")
=== re | It matches far too much text.
import re
html = "<b>one</b> and <b>two</b>"
print(re.findall("<b>(.*)</b>", html))
=== re | The word is never found.
import re
text = "the cat sat"
print(re.search("\bcat\b", text))
=== re | It fails with 'NoneType' object has no attribute 'group'.
import re
line = "error: code 42"
code = re.match(r"\d+", line).group()
=== re | The version "1x5" is accepted.
import re
pattern = re.compile(r"\d.\d")
print(bool(pattern.fullmatch("1x5")))
=== re | Only the first two matches are replaced.
import re
text = "a a a a"
print(re.sub("a", "b", text, re.IGNORECASE))
=== string | A KeyError is raised when a value is missing.
from string import Template
t = Template("Dear $name, you owe $amount.")
print(t.substitute(name="Sam"))
=== datetime | TypeError: can't compare offset-naive and offset-aware datetimes.
from datetime import datetime, timezone
deadline = datetime(2030, 1, 1, tzinfo=timezone.utc)
if datetime.now() > deadline:
    print("late")
=== datetime | Two days show up as a tiny number of seconds.
from datetime import timedelta
delta = timedelta(days=2, seconds=5)
print("elapsed seconds:", delta.seconds)
=== datetime | The minutes are always wrong.
from datetime import datetime
print(datetime.now().strftime("%H:%m"))
=== datetime | AttributeError: module 'datetime' has no attribute 'now'.
import datetime
print(datetime.now())
=== time | The measured time is sometimes negative.
import time
start = time.time()
do_work()
print("took", time.time() - start)
=== math | It raises ValueError: math domain error.
import math

def root(a, b, c):
    return (-b + math.sqrt(b * b - 4 * a * c)) / (2 * a)

print(root(1, 2, 5))
=== math | sin(90) is not 1.
import math
print(math.sin(90))
=== statistics | StatisticsError is raised for a single measurement.
import statistics
readings = [4.2]
print(statistics.stdev(readings))
=== decimal | The result is still imprecise.
from decimal import Decimal
price = Decimal(0.1)
print(price * 3)
=== random | The variable is None after shuffling.
import random
deck = list(range(52))
deck = random.shuffle(deck)
print(deck[0])
=== random | It raises TypeError when given a set.
import random
users = {"ann", "bob", "cleo"}
print(random.choice(users))
=== hashlib | It raises TypeError: Strings must be encoded before hashing.
import hashlib
print(hashlib.sha256("secret").hexdigest())
=== base64 | The header comes out as Basic b'dXNlcjpwYXNz'.
import base64
token = base64.b64encode(b"user:pass")
print(f"Basic {token}")
=== struct | It raises struct.error: unpack requires a buffer of 4 bytes.
import struct
data = b"\x01\x02"
(value,) = struct.unpack("<I", data)
=== bisect | It returns 4, but 90 is at index 1.
import bisect
scores = [70, 90, 60, 80]
print(bisect.bisect_left(scores, 90))
=== heapq | I want the largest item, but I get the smallest.
import heapq
scores = [5, 9, 1]
heapq.heapify(scores)
print("best:", heapq.heappop(scores))
=== heapq | TypeError: '<' not supported between instances of 'dict' and 'dict'.
import heapq
tasks = []
heapq.heappush(tasks, (1, {"name": "a"}))
heapq.heappush(tasks, (1, {"name": "b"}))
=== copy | Changing the copy also changes the original.
import copy
config = {"db": {"host": "localhost"}}
test_config = copy.copy(config)
test_config["db"]["host"] = "testdb"
print(config["db"]["host"])
=== contextlib | Cleanup does not run when the body raises.
from contextlib import contextmanager

@contextmanager
def connection():
    conn = connect()
    yield conn
    conn.close()
=== dataclasses | ValueError: mutable default <class 'list'> for field tags is not allowed.
from dataclasses import dataclass

@dataclass
class Post:
    title: str
    tags: list = []
=== dataclasses | It complains that a non-default argument follows a default argument.
from dataclasses import dataclass

@dataclass
class User:
    active: bool = True
    name: str
=== enum | The comparison is never true.
from enum import Enum

class Color(Enum):
    RED = "red"

choice = "red"
if choice == Color.RED:
    print("match")
=== abc | I can create an instance although the method is abstract.
from abc import abstractmethod

class Shape:
    @abstractmethod
    def area(self): ...

shape = Shape()
=== logging | Nothing is printed.
import logging
logging.basicConfig()
logging.info("server started")
=== logging | Every message is logged twice, then three times.
import logging

def get_logger():
    logger = logging.getLogger("app")
    logger.addHandler(logging.StreamHandler())
    return logger
=== argparse | Passing --verbose False still turns it on.
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--verbose", type=bool, default=False)
args = parser.parse_args()
=== argparse | AttributeError: 'Namespace' object has no attribute 'dry-run'.
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--dry-run", action="store_true")
args = parser.parse_args()
print(getattr(args, "dry-run"))
=== subprocess | FileNotFoundError: No such file or directory: 'ls -l'.
import subprocess
subprocess.run(["ls -l"])
=== subprocess | result.stdout is None.
import subprocess
result = subprocess.run(["git", "status"])
print(result.stdout)
=== subprocess | The script continues even when the command fails.
import subprocess
subprocess.run(["make", "test"])
print("all tests passed")
=== subprocess | The wildcard is not expanded.
import subprocess
subprocess.run(["rm", "*.tmp"])
=== threading | The function runs in the main thread and blocks.
import threading
t = threading.Thread(target=download())
t.start()
=== threading | The total is sometimes too low with many threads.
import threading
total = 0

def deposit(n):
    global total
    for _ in range(n):
        current = total
        total = current + 1
=== threading | TypeError: worker() takes 1 positional argument but 5 were given.
import threading

def worker(name):
    print(name)

threading.Thread(target=worker, args=("alice")).start()
=== threading | The program hangs forever.
import threading
lock = threading.Lock()

def outer():
    with lock:
        inner()

def inner():
    with lock:
        print("done")

outer()
=== queue | q.join() never returns.
import queue
import threading
q = queue.Queue()

def worker():
    while True:
        print(q.get())

threading.Thread(target=worker, daemon=True).start()
q.put("job")
q.join()
=== multiprocessing | The list is still empty in the parent process.
from multiprocessing import Process
results = []

def work():
    results.append(42)

if __name__ == "__main__":
    p = Process(target=work)
    p.start()
    p.join()
    print(results)
=== multiprocessing | It raises a pickling error.
from multiprocessing import Pool

if __name__ == "__main__":
    with Pool() as pool:
        print(pool.map(lambda x: x * 2, [1, 2, 3]))
=== concurrent.futures | Exceptions in my tasks disappear silently.
from concurrent.futures import ThreadPoolExecutor

def task(n):
    return 10 / n

with ThreadPoolExecutor() as pool:
    for n in [1, 0, 2]:
        pool.submit(task, n)
=== asyncio | I get "coroutine 'fetch' was never awaited".
import asyncio

async def fetch():
    await asyncio.sleep(1)
    return "data"

async def main():
    result = fetch()
    print(result)

asyncio.run(main())
=== asyncio | The two tasks run one after the other instead of concurrently.
import asyncio
import time

async def job(name):
    time.sleep(1)
    print(name)

async def main():
    await asyncio.gather(job("a"), job("b"))

asyncio.run(main())
=== asyncio | RuntimeError: asyncio.run() cannot be called from a running event loop.
import asyncio

async def inner():
    return 1

async def outer():
    return asyncio.run(inner())

asyncio.run(outer())
=== socket | It raises TypeError: a bytes-like object is required, not 'str'.
import socket
s = socket.create_connection(("example.com", 80))
s.send("GET / HTTP/1.0\r\n\r\n")
=== socket | Long messages arrive cut off.
import socket

def read_message(conn):
    return conn.recv(1024).decode()
=== urllib.parse | Names that contain & break the query string.
name = "Tom & Co"
url = "https://example.com/search?q=" + name
=== urllib.request | It raises TypeError: can only concatenate str (not "bytes") to str.
import urllib.request
with urllib.request.urlopen("https://example.com") as r:
    text = r.read()
print("Page: " + text)
=== sqlite3 | The row is missing after I restart the program.
import sqlite3
conn = sqlite3.connect("app.db")
conn.execute("INSERT INTO users VALUES ('ada')")
conn.close()
=== sqlite3 | A reviewer says that this query is unsafe.
import sqlite3

def find(conn, name):
    return conn.execute(f"SELECT * FROM users WHERE name = '{name}'").fetchall()
=== sqlite3 | It says Incorrect number of bindings supplied.
import sqlite3
conn = sqlite3.connect(":memory:")
conn.execute("CREATE TABLE users (name TEXT)")
conn.execute("INSERT INTO users VALUES (?)", ("ada"))
=== xml.etree.ElementTree | find returns None although the tag is there.
import xml.etree.ElementTree as ET
root = ET.fromstring('<feed xmlns="http://www.w3.org/2005/Atom"><title>Hi</title></feed>')
print(root.find("title"))
=== unittest | The test is never run.
import unittest

class MathTest(unittest.TestCase):
    def check_add(self):
        self.assertEqual(1 + 1, 2)

unittest.main()
=== unittest | The test passes even though parse never raises.
import unittest

class ParseTest(unittest.TestCase):
    def test_bad_input(self):
        try:
            parse("bad")
        except ValueError:
            pass
=== unittest.mock | The real function is still called in my test.
# app.py contains: from mailer import send
from unittest.mock import patch
import app

with patch("mailer.send"):
    app.notify("hello")
=== weakref | The reference is dead right away.
import weakref

class Node: ...

ref = weakref.ref(Node())
print(ref())
=== warnings | My deprecation warning is not shown to callers in other modules.
import warnings

def old_api():
    warnings.warn("use new_api", DeprecationWarning)
=== gzip | It raises TypeError: memoryview: a bytes-like object is required, not 'str'.
import gzip
with gzip.open("log.gz", "w") as f:
    f.write("hello\n")
=== zipfile | The archive is corrupt when I open it.
import zipfile
z = zipfile.ZipFile("out.zip", "w")
z.write("report.txt")
upload("out.zip")
=== io | read() returns an empty string.
import io
buffer = io.StringIO()
buffer.write("hello")
print(buffer.read())
=== shlex | A file name with a space is split in two.
command = 'cp "my file.txt" backup'
args = command.split()
print(args)
=== ast | It raises ValueError: malformed node or string.
import ast
print(ast.literal_eval("range(3)"))
=== tomllib | It raises TypeError: File must be opened in binary mode.
import tomllib
with open("pyproject.toml") as f:
    data = tomllib.load(f)
=== ipaddress | ValueError: 192.168.1.5/24 has host bits set.
import ipaddress
net = ipaddress.ip_network("192.168.1.5/24")
=== timeit | NameError: name 'data' is not defined.
import timeit
data = list(range(1000))
print(timeit.timeit("sum(data)", number=1000))
=== signal | Ctrl+C raises TypeError: stop() takes 0 positional arguments but 2 were given.
import signal

def stop():
    print("stopping")

signal.signal(signal.SIGINT, stop)
=== zoneinfo | The time changes its zone, but the hour stays the same.
from datetime import datetime, timezone
from zoneinfo import ZoneInfo
t = datetime(2024, 5, 1, 12, tzinfo=timezone.utc)
print(t.replace(tzinfo=ZoneInfo("Asia/Tokyo")))
"""

DEBUG_WORDINGS = (
    "What's wrong with this code?\n\n{c}",
    "Find the bug in this snippet and fix it:\n\n{c}",
    "Please review this code. There is a bug in it.\n\n{c}",
    "Why doesn't this do what I expect?\n\n{c}",
    "Spot the mistake:\n\n{c}",
    "Can you fix this?\n\n{c}",
    "{c}\n\nThis code has a problem. What is it, and what is the correct version?",
    "What is the bug here? Answer in one or two sentences.\n\n{c}",
    "A junior developer wrote this. What would you change, and why?\n\n{c}",
)

SYMPTOM_WORDINGS = (
    "{s} Why?\n\n{c}",
    "{s} How do I fix it?\n\n{c}",
    "{s} What am I doing wrong?\n\n{c}",
    "I have this code:\n\n{c}\n\n{s} What is the cause?",
    "Help me debug this. {s}\n\n{c}",
    "{c}\n\n{s} Please show a corrected version.",
    "{s} Explain the problem and the fix.\n\n{c}",
    "Here is my code:\n\n{c}\n\n{s} Any idea?",
)


def code(name: str) -> str:
    """`name` in backticks, unless it is prose or already holds some."""
    return name if " " in name or "`" in name or name == "f-strings" else f"`{name}`"


def qualified(block: str) -> list[str]:
    """The full names in a block of "module: names" lines."""
    names = []
    module = ""
    for word in block.split():
        if word.endswith(":"):
            module = word[:-1]
        else:
            names.append(word if module == "builtins" else f"{module}.{word}")
    return names


def rows(block: str) -> list[tuple[str, str]]:
    """The two columns of a block of "left | right" lines."""
    pairs = (line.partition(" | ") for line in block.strip().splitlines())
    return [(left, right) for left, _, right in pairs]


def snippets() -> list[tuple[str, str]]:
    """The symptom and fenced snippet of each debug entry."""
    found = []
    for entry in DEBUG.strip().removeprefix("=== ").split("\n=== "):
        head, _, body = entry.partition("\n")
        found.append((head.partition(" | ")[2], f"```python\n{body.rstrip()}\n```"))
    return found


def shuffled(items: Sequence[T], rng: random.Random) -> list[T]:
    """`items` in random order, by `random()` alone: Python keeps only that sequence fixed."""
    return [item for _, _, item in sorted((rng.random(), i, item) for i, item in enumerate(items))]


def fill(wording: str, fields: dict[str, str]) -> str:
    """`wording` with its {x} replaced, and {x^} replaced with a capital first letter."""
    for key, value in fields.items():
        wording = wording.replace(f"{{{key}^}}", value[:1].upper() + value[1:])
        wording = wording.replace(f"{{{key}}}", value)
    return wording


def topic(subject: dict[str, str]) -> str:
    """What prompts on one subject share, so that no subject lands on both sides of a split."""
    return hashlib.sha256("\n".join(sorted(subject.values())).encode()).hexdigest()[:12]


def ask(wordings: Sequence[str], subjects: Sequence[dict[str, str]], rng: random.Random) -> Iterator[Prompt]:
    """Each subject in one wording, all wordings used about equally often; yields topic and text."""
    for place, subject in enumerate(shuffled(subjects, rng)):
        yield topic(subject), fill(wordings[place % len(wordings)], subject)


def explain(rng: random.Random) -> Iterator[Prompt]:
    """Questions on what a function, class or module is."""
    for wordings, names in (
        (FUNCTION_WORDINGS, qualified(FUNCTIONS)),
        (CLASS_WORDINGS, qualified(CLASSES)),
        (MODULE_WORDINGS, MODULES.split()),
    ):
        yield from ask(wordings, [{"n": code(name)} for name in names], rng)


def write(rng: random.Random) -> Iterator[Prompt]:
    """Requests for code, once with the tool named and once without."""
    tasks = [{"m": code(tool), "t": task} for tool, task in rows(WRITE)]
    yield from ask(WRITE_WORDINGS, tasks, rng)
    yield from ask(OPEN_WRITE_WORDINGS, tasks, rng)


def compare(rng: random.Random) -> Iterator[Prompt]:
    """Questions on how two related things differ."""
    pairs = [{"a": code(left), "b": code(right)} for left, right in rows(COMPARE)]
    yield from ask(COMPARE_WORDINGS, pairs, rng)


def debug(rng: random.Random) -> Iterator[Prompt]:
    """Snippets with a bug, once alone and once with what the user sees."""
    bugs = [{"s": symptom, "c": snippet} for symptom, snippet in snippets()]
    yield from ask(DEBUG_WORDINGS, bugs, rng)
    yield from ask(SYMPTOM_WORDINGS, bugs, rng)


def when(rng: random.Random) -> Iterator[Prompt]:
    """Questions on when to use a thing, or whether it suits a purpose."""
    yield from ask(WHEN_WORDINGS, [{"n": code(name)} for name in WHEN.split()], rng)
    yield from ask(SUITED_WORDINGS, [{"n": code(n), "p": purpose} for n, purpose in rows(SUITED)], rng)


KINDS = {"explain": explain, "write": write, "compare": compare, "debug": debug, "when": when}


def prompts(seed: int = SEED) -> list[Prompt]:
    """All prompts, in the order of the file."""
    rng = random.Random(seed)
    return shuffled([prompt for make in KINDS.values() for prompt in make(rng)], rng)


def main() -> None:
    """Write the file."""
    parser = argparse.ArgumentParser(description="Write prompts about Python's standard library.")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_name("python_stdlib.jsonl"))
    args = parser.parse_args()
    with args.output.open("w", encoding="utf-8", newline="\n") as file:
        for number, (conversation, prompt) in enumerate(prompts(), 1):
            messages = [{"role": "user", "content": prompt}]
            record = {"id": f"stdlib-{number:04d}", "conversation": conversation, "messages": messages}
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
