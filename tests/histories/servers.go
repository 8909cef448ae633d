package main

import (
	"fmt"
	"math/rand/v2"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// server is a process that faults stop, kill and start again.
type server struct {
	mutex   sync.Mutex
	command []string
	log     string
	process *exec.Cmd
}

func (s *server) start() error {
	log, err := os.OpenFile(s.log, os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return err
	}
	defer log.Close()
	s.process = exec.Command(s.command[0], s.command[1:]...)
	s.process.Stdout, s.process.Stderr = log, log
	// No server outlives this program.
	s.process.SysProcAttr = &syscall.SysProcAttr{Pdeathsig: syscall.SIGKILL}
	return s.process.Start()
}

func (s *server) signal(signal syscall.Signal) { _ = s.process.Process.Signal(signal) }

func (s *server) kill() {
	s.signal(syscall.SIGKILL)
	_ = s.process.Wait()
}

// freePorts returns different ports that nobody uses now.
func freePorts(count int) ([]int, error) {
	var ports []int
	for range count {
		listener, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			return nil, err
		}
		// All of them stay open until the last one is found.
		defer listener.Close()
		ports = append(ports, listener.Addr().(*net.TCPAddr).Port)
	}
	return ports, nil
}

// cluster is a set of masters that sync each write, and gateways over them.
type cluster struct {
	masters, gateways []*server
	urls              []string
}

func newCluster(folder, gateway string, masters, gateways int) (*cluster, error) {
	var made cluster
	ports, err := freePorts(masters + gateways)
	if err != nil {
		return nil, err
	}
	var nodes []string
	for n, port := range ports[:masters] {
		data := filepath.Join(folder, fmt.Sprintf("master-%d", n))
		if err := os.Mkdir(data, 0o700); err != nil {
			return nil, err
		}
		words := []string{
			"redis-server", "--bind", "127.0.0.1", "--port", fmt.Sprint(port), "--dir", data, "--save", "",
			"--appendonly", "yes", "--appendfsync", "always", "--maxmemory-policy", "noeviction",
		}
		made.masters = append(made.masters, &server{command: words, log: data + ".log"})
		nodes = append(nodes, "--node", fmt.Sprintf("redis://127.0.0.1:%d", port))
	}
	for n, port := range ports[masters:] {
		address := fmt.Sprintf("127.0.0.1:%d", port)
		command := append([]string{gateway, "--listen", address, "--drain-delay", "0s"}, nodes...)
		log := filepath.Join(folder, fmt.Sprintf("gateway-%d.log", n))
		made.gateways = append(made.gateways, &server{command: command, log: log})
		made.urls = append(made.urls, "http://"+address)
	}
	return &made, made.start()
}

// start starts the masters, then one gateway that lets new masters vote at once, then the others.
func (c *cluster) start() error {
	for _, master := range c.masters {
		if err := master.start(); err != nil {
			return err
		}
	}
	for n, gateway := range c.gateways {
		plain := gateway.command
		if n == 0 {
			gateway.command = append(append([]string{}, plain...), "--bootstrap")
		}
		if err := gateway.start(); err != nil {
			return err
		}
		gateway.command = plain
		if err := c.isReady(n); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) isReady(gateway int) error {
	var last string
	for range 600 {
		got, err := http.Get(c.urls[gateway] + "/readyz")
		if err == nil {
			got.Body.Close()
			if got.StatusCode == http.StatusOK {
				return nil
			}
			last = got.Status
		} else {
			last = err.Error()
		}
		time.Sleep(100 * time.Millisecond)
	}
	return fmt.Errorf("gateway %d is not ready: %s", gateway, last)
}

func (c *cluster) stop() {
	for _, server := range append(append([]*server{}, c.gateways...), c.masters...) {
		if server.process != nil {
			server.signal(syscall.SIGCONT)
			server.kill()
		}
	}
}

// faults disturbs servers until `done` is closed, and counts the faults by kind.
func (c *cluster) faults(
	random *rand.Rand, done <-chan struct{}, failed func(error),
) map[string]int {
	counts := map[string]int{}
	for {
		millis := func(most int) time.Duration {
			return time.Duration(50+random.IntN(most)) * time.Millisecond
		}
		select {
		case <-done:
			return counts
		case <-time.After(millis(800)):
		}
		servers, what := c.masters, "master"
		if random.IntN(4) == 0 {
			servers, what = c.gateways, "gateway"
		}
		if random.IntN(3) == 0 {
			counts["killed "+what]++
			one := servers[random.IntN(len(servers))]
			one.kill()
			time.Sleep(millis(500))
			if err := one.start(); err != nil {
				failed(err)
				return counts
			}
			continue
		}
		count := 1 + random.IntN((len(servers)+1)/2)
		counts[fmt.Sprintf("stopped %d %ss", count, what)]++
		order := random.Perm(len(servers))[:count]
		for _, n := range order {
			servers[n].signal(syscall.SIGSTOP)
		}
		time.Sleep(millis(1_500))
		for _, n := range order {
			servers[n].signal(syscall.SIGCONT)
		}
	}
}
