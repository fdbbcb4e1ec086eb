// The first and only program of a guest with NUMA nodes: runs layers with the shapes of real models on threads of its
// own, one for each CPU, with what the library itself finds out of nodes and pages. One line "RESULT {...}" for each
// layer, which tests/ops_cpp/numa/test_guest.py judges. Scenarios come from the kernel's command line, as in
// hina=shapes,bind.
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/reboot.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <map>
#include <string>

#include "guest_runs.h"
#include "runtime/files.h"

using namespace guest;

namespace {

unsigned long all_nodes() {
  unsigned long mask = 0;
  for (const NumaNode& node : read_topology().nodes)
    if (node.memory_allowed) mask |= 1UL << node.id;
  return mask;
}

// Interleaved pages; data begins 64 bytes into a page.
void interleaved(const char* scenario, const Shape& s, Weights weights, int64_t room = kRoom) {
  const int64_t experts = experts_in(s, weights, room);
  const Pages pages(experts * expert_bytes(s, weights) + 64, MPOL_INTERLEAVE, all_nodes());
  const Layer layer(s, weights, experts, pages.data() + 64);
  print(scenario, s, weights, run_layer(s, weights, layer, NumaMode::kAuto, experts));
}

void shapes() {
  for (const Shape& s : kShapes)
    for (const Weights weights : {Weights::kBf16, Weights::kInt8, Weights::kInt4}) interleaved("shapes", s, weights);
}

void few() {
  for (const Weights weights : {Weights::kBf16, Weights::kInt8, Weights::kInt4}) interleaved("few", kQwen36, weights);
}

void one_node() {
  const Pages pages(4 * expert_bytes(kQwen36, Weights::kInt8), MPOL_BIND, 2);
  const Layer layer(kQwen36, Weights::kInt8, 4, pages.data());
  print("one_node", kQwen36, Weights::kInt8, run_layer(kQwen36, Weights::kInt8, layer, NumaMode::kAuto, 4));
}

void bind_mode() {
  for (const Weights weights : {Weights::kBf16, Weights::kInt8, Weights::kInt4}) {
    const Pages pages(4 * expert_bytes(kQwen36, weights) + 64, MPOL_BIND, 1);
    const Layer layer(kQwen36, weights, 4, pages.data() + 64);
    print("bind", kQwen36, weights, run_layer(kQwen36, weights, layer, NumaMode::kBind, 4));
  }
}

void copy_mode() {
  const Pages pages(4 * expert_bytes(kQwen36, Weights::kInt8), MPOL_BIND, 1);
  const Layer layer(kQwen36, Weights::kInt8, 4, pages.data());
  print("copy", kQwen36, Weights::kInt8, run_layer(kQwen36, Weights::kInt8, layer, NumaMode::kCopy, 4));
}

// Whole experts on nodes, and all tokens at those of the first node.
void skewed() {
  const int64_t bytes = expert_bytes(kQwen36, Weights::kInt8);
  Pages pages(8 * bytes, MPOL_BIND, 1);
  pages.bind(static_cast<size_t>(4 * bytes), static_cast<size_t>(4 * bytes), 1);
  const Layer layer(kQwen36, Weights::kInt8, 8, pages.data(), true);
  print("skewed", kQwen36, Weights::kInt8, run_layer(kQwen36, Weights::kInt8, layer, NumaMode::kAuto, 4));
}

void write_file(const char* path, const char* text) {
  const int file = open(path, O_WRONLY);
  CHECK(file >= 0 && write(file, text, std::strlen(text)) > 0, "%s: %s", path, std::strerror(errno));
  close(file);
}

void offline() {
  write_file("/sys/devices/system/cpu/cpu3/online", "0");
  interleaved("offline", kQwen36, Weights::kInt8);
  write_file("/sys/devices/system/cpu/cpu3/online", "1");
}

// Of four nodes with one CPU each, the third is left out.
void cpuset() {
  mkdir("/cgroup", 0755);
  CHECK(mount("cgroup2", "/cgroup", "cgroup2", 0, nullptr) == 0, "cgroup2: %s", std::strerror(errno));
  write_file("/cgroup/cgroup.subtree_control", "+cpuset");
  mkdir("/cgroup/some", 0755);
  write_file("/cgroup/some/cpuset.cpus", "0-1,3");
  write_file("/cgroup/some/cpuset.mems", "0-1,3");
  write_file("/cgroup/some/cgroup.procs", "0");
  interleaved("cpuset", kQwen36, Weights::kInt8);
}

// The CPUs of the third node only: its pages go to the nearest of the others.
void affinity() {
  cpu_set_t set;
  CPU_ZERO(&set);
  for (const int cpu : {0, 1, 3}) CPU_SET(cpu, &set);
  CHECK(sched_setaffinity(0, sizeof set, &set) == 0, "sched_setaffinity");
  interleaved("affinity", kQwen36, Weights::kInt8);
}

// move_pages is not permitted, as in containers with a strict profile.
void seccomp() {
  sock_filter filter[] = {BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(seccomp_data, nr)),
                          BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_move_pages, 0, 1),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EPERM),
                          BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)};
  const sock_fprog program{sizeof filter / sizeof *filter, filter};
  const Pages pages(expert_bytes(kQwen36, Weights::kInt8), MPOL_INTERLEAVE, all_nodes());
  const Layer layer(kQwen36, Weights::kInt8, 1, pages.data());
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0 && prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0,
        "seccomp");
  for (const NumaMode mode : {NumaMode::kAuto, NumaMode::kInterleave, NumaMode::kBind}) {
    LayerNuma numa(read_topology(), {mode, "HINA_NUMA", {}}, layer.params);
    Run run;
    run.text = numa.look();
    if (run.text.empty()) run.text = numa.text();
    run.complete = numa.error().empty() && numa.refused() == (mode != NumaMode::kAuto);
    print("seccomp", kQwen36, Weights::kInt8, run);
  }
}

void topology() {
  const Topology topology = read_topology();
  for (const NumaNode& node : topology.nodes)
    std::printf("node %d: %zu CPUs, %ld MiB\n", node.id, node.cpus.size(), static_cast<long>(node.memory_bytes >> 20));
}

const std::map<std::string, void (*)()> kScenarios = {{"topology", topology}, {"shapes", shapes},   {"few", few},
                                                      {"one_node", one_node}, {"bind", bind_mode},  {"copy", copy_mode},
                                                      {"skewed", skewed},     {"offline", offline}, {"cpuset", cpuset},
                                                      {"affinity", affinity}, {"seccomp", seccomp}};

// In a process of its own: scenarios change what theirs may do.
void run_scenario(const std::string& name) {
  std::printf("SCENARIO %s\n", name.c_str());
  std::fflush(stdout);
  const pid_t child = fork();
  if (child == 0) {
    kScenarios.at(name)();
    std::fflush(stdout);
    _exit(0);
  }
  int status = 0;
  waitpid(child, &status, 0);
  std::printf("ENDED %s %d\n", name.c_str(), status);
  std::fflush(stdout);
}

}  // namespace

int main() {
  mount("proc", "/proc", "proc", 0, nullptr);
  mount("sysfs", "/sys", "sysfs", 0, nullptr);
  mount("devtmpfs", "/dev", "devtmpfs", 0, nullptr);
  const int console = open("/dev/ttyS0", O_RDWR);
  for (const int fd : {0, 1, 2}) dup2(console, fd);
  setvbuf(stdout, nullptr, _IOLBF, 1 << 16);
  const std::string line = read_file("/proc/cmdline");
  std::string list = line.substr(line.find("hina=") + 5);
  list = list.substr(0, list.find_first_of(" \n"));
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find(',', at), list.size());
    run_scenario(list.substr(at, end - at));
    at = end + 1;
  }
  reboot(RB_POWER_OFF);
}
