"""What an attacker runs inside a sandbox: programs for the machine's own Python. Each prints what it found as JSON."""

HEAD = """
import ctypes, errno, fcntl, json, mmap, os, platform, resource, signal, socket, struct, sys, time
libc = ctypes.CDLL(None, use_errno=True)
def call(number, *words):
    ctypes.set_errno(0)
    result = libc.syscall(ctypes.c_long(number), *(ctypes.c_long(word) for word in words))
    return 0 if result >= 0 else ctypes.get_errno()
def many(make, most):
    made, why = [], None
    try:
        while len(made) < most:
            made.append(make())
    except OSError as error:
        why = errno.errorcode[error.errno]
    return made, why
def tell(**found):
    print(json.dumps(found), flush=True)
def hold():
    open("/workspace/holds", "w").close()
    while not os.path.exists("/workspace/go"):
        time.sleep(0.01)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(20000, resource.getrlimit(resource.RLIMIT_NOFILE)[1]),) * 2)
def inotify():
    fd = libc.inotify_init1(0)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "inotify")
    return fd
librt = ctypes.CDLL("librt.so.1", use_errno=True)
def queue(number=[0]):
    number[0] += 1
    attributes = struct.pack("=8q", 0, 10, 8192, 0, 0, 0, 0, 0)
    fd = librt.mq_open(b"/q%d" % number[0], os.O_CREAT | os.O_RDWR, 0o600, attributes)
    if fd < 0:
        raise OSError(ctypes.get_errno(), "mq_open")
    return fd
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGRTMIN})
def queued_signal():
    if libc.sigqueue(os.getpid(), signal.SIGRTMIN, None) < 0:
        raise OSError(ctypes.get_errno(), "sigqueue")
def large_pipe():
    read, write = os.pipe()
    fcntl.fcntl(write, 1031, 1 << 20)
    return read, write
def in_flight():
    ends = socket.socketpair()
    socket.send_fds(ends[0], [b"x"], [0] * 16)
    return ends
"""

CALLS = HEAD + "tell(answers={name: call(number, *words) for name, number, *words in json.load(sys.stdin)})"

KEYS = (
    HEAD
    + """
add, join = (248, 250) if platform.machine() == "x86_64" else (217, 219)
found = [libc.syscall(add, b"user", b"polar-secret", b"x", 1, ring) for ring in range(-5, 0)]
read = ""
for name in ("/proc/keys", "/proc/key-users"):
    try:
        read += open(name).read()
    except OSError:
        pass
tell(added=[key for key in found if key > 0], read=read)
"""
)

FLOODS = {
    "inotify": "inotify",
    "message queues": "queue",
    "signals": "queued_signal",
    "pipes": "large_pipe",
    "descriptors in flight": "in_flight",
    "terminals": "os.openpty",
}

FLOOD = HEAD + "made, why = many({make}, {most}); tell(count=len(made), why=why); hold()"

NEIGHBOUR = (
    HEAD
    + """
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
made, why = many({make}, 8)
pipe = os.pipe()
tell(count=len(made), why=why, pipe=fcntl.fcntl(pipe[1], 1032))
"""
)

FAMILIES = (
    HEAD
    + """
def attempt(family, kind, protocol):
    try:
        socket.socket(family, kind, protocol).close()
    except OSError as error:
        return errno.errorcode.get(error.errno)
tell(
    opened=[f for f in range(64) for k in (1, 2, 3, 5) if f not in (1, 2, 10, 16) and attempt(f, k, 0) != "EPERM"],
    usual=[attempt(1, 1, 0), attempt(2, 1, 0), attempt(2, 2, 0), attempt(10, 1, 0), attempt(16, 3, 0)],
    modules=[p for p in (33, 132, 136, 256) for f in (2, 10) if attempt(f, 1, p) != "EPERM"],
    netlink=[p for p in range(5, 23) if attempt(16, 3, p) != "EPERM"],
)
"""
)

# getpid of i386 through its own gate, and of x32; a second filter that allows all; a notifying one
FOREIGN = (
    HEAD
    + """
found = {}
if platform.machine() == "x86_64":
    code = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    code.write(bytes.fromhex("53b814000000cd805bc3"))
    gate = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(code)))
    found["i386"] = -gate()
    found["x32"] = call(0x40000000 | 39)
keyctl, seccomp = (250, 317) if platform.machine() == "x86_64" else (219, 277)
libc.prctl(38, 1, 0, 0, 0)
class Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))
def install(*instructions, flags=0):
    program = Program(len(instructions), b"".join(struct.pack("=HBBI", *it) for it in instructions))
    return libc.syscall(seccomp, 1, flags, ctypes.byref(program))
found["own filter"] = install((6, 0, 0, 0x7FFF0000))
notified = install((0x20, 0, 0, 0), (0x15, 0, 1, keyctl), (6, 0, 0, 0x7FC00000), (6, 0, 0, 0x7FFF0000), flags=8)
found["notifying"] = notified >= 0
found["keyctl"] = call(keyctl, 0, 0)
tell(**found)
"""
)

NAMESPACES = (
    HEAD
    + """
clone, unshare, setns = (56, 272, 308) if platform.machine() == "x86_64" else (220, 97, 268)
found = {"clone3": call(435, 0, 0)}
kinds = (0x80, 0x20000, 0x2000000, 0x4000000, 0x8000000, 0x10000000, 0x20000000, 0x40000000)
found["unshare"] = [kind for kind in kinds if call(unshare, kind) != errno.EPERM]
found["clone"] = [kind for kind in kinds[1:] if call(clone, kind | 17, 0, 0, 0, 0) != errno.EPERM]
found["setns"] = []
for name in os.listdir("/proc/1/ns"):
    fd = os.open("/proc/1/ns/" + name, os.O_RDONLY)
    if call(setns, fd, 0) == 0:
        found["setns"].append(name)
tell(**found)
"""
)

KERNEL_FILES = (
    HEAD
    + """
opened = []
def look(path):
    if os.path.islink(path):
        return
    if os.path.isdir(path):
        for name in os.listdir(path) if os.access(path, os.R_OK) else ():
            look(path + "/" + name)
        return
    try:
        fd = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    except OSError:
        return
    if os.fstat(fd).st_rdev != os.makedev(1, 3):  # hidden behind /dev/null
        opened.append(path)
    os.close(fd)
for name in os.listdir("/proc"):
    if not name.isdigit():
        look("/proc/" + name)
tell(opened=opened)
"""
)

FIRST_PROCESS = (
    HEAD
    + """
status = dict(line.split(":", 1) for line in open("/proc/1/status"))
own = dict(line.split(":", 1) for line in open("/proc/self/status"))
tell(
    seccomp=[status["Seccomp"].strip(), own["Seccomp"].strip()],
    capabilities=[status["CapEff"].strip(), status["CapBnd"].strip()],
    limits=[status["NoNewPrivs"].strip(), own["NoNewPrivs"].strip()],
    groups=own["Groups"].split(),
    reopened=[bool(open(f"/dev/{name}", mode)) for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w"))],
)
"""
)
