// Checks that the answers of real gateways under faults are linearizable: for each lock there is an
// order of all requests, between their beginnings and ends, in which each answer is right. The
// checker is Porcupine (https://github.com/anishathalye/porcupine), the model is in model.go.
//
// Masters and gateways are stopped, killed and started again meanwhile. After the run, violations
// are planted into the histories, and the checker must find each of them.
package main

import (
	"flag"
	"fmt"
	"math"
	"math/rand/v2"
	"net/http"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/anishathalye/porcupine"
)

// locks is how many locks are in use at a time, and clients is how many clients each of them has.
const (
	locks   = 4
	clients = 3
)

// mostPlanted is into how many histories violations are planted.
const mostPlanted = 100

// patience is how long a client waits for an answer, and how long one check may take.
const patience = 10 * time.Second

func main() {
	gateway := flag.String("gateway", "", "program of the gateway")
	seconds := flag.Int("seconds", 60, "how long clients send requests")
	seed := flag.Uint64("seed", uint64(time.Now().UnixNano()), "seed of clients and faults")
	out := flag.String("out", "", "folder for pictures of wrong histories; default: a new one")
	flag.Parse()
	if err := run(*gateway, time.Duration(*seconds)*time.Second, *seed, *out); err != nil {
		fmt.Fprintln(os.Stderr, "tests/histories:", err)
		os.Exit(1)
	}
}

func run(gateway string, length time.Duration, seed uint64, out string) error {
	fmt.Printf("tests/histories: --seconds %d --seed %d\n", int(length.Seconds()), seed)
	folder, err := os.MkdirTemp("", "histories")
	if err != nil {
		return err
	}
	if out == "" {
		out = folder
	}
	cluster, err := newCluster(folder, gateway, 5, 2)
	if cluster != nil {
		defer cluster.stop()
	}
	if err != nil {
		return err
	}
	var mutex sync.Mutex
	var failures []string
	odd := func(text string) {
		mutex.Lock()
		defer mutex.Unlock()
		failures = append(failures, text)
	}
	done := make(chan struct{})
	counted := make(chan map[string]int)
	go func() {
		random := rand.New(rand.NewPCG(seed, 0))
		counted <- cluster.faults(random, done, func(err error) { odd(err.Error()) })
	}()
	histories := gather(cluster.urls, length, seed, odd)
	close(done)
	counts := <-counted
	cluster.stop()
	if len(failures) > 0 {
		return fmt.Errorf("%d unexpected answers, the first: %s", len(failures), failures[0])
	}
	if err := check(histories, out); err != nil {
		return err
	}
	fmt.Printf("tests/histories: faults: %v\n", counts)
	return os.RemoveAll(folder)
}

// gather lets clients send requests about one lock after the other.
func gather(urls []string, length time.Duration, seed uint64, odd func(string)) []*history {
	var mutex sync.Mutex
	var histories []*history
	var groups sync.WaitGroup
	began := time.Now()
	sender := &http.Client{Timeout: patience}
	for group := range locks {
		groups.Add(1)
		go func() {
			defer groups.Done()
			for number := 0; time.Since(began) < length; number++ {
				var history history
				var all sync.WaitGroup
				for n := range clients {
					all.Add(1)
					stream := uint64(1 + group + locks*(n+clients*number))
					one := client{
						number: n, lock: fmt.Sprintf("h/%d/%d", group, number), gateways: urls, http: sender,
						random: rand.New(rand.NewPCG(seed, stream)), began: began, history: &history, odd: odd,
					}
					go one.run(&all)
				}
				all.Wait()
				mutex.Lock()
				histories = append(histories, &history)
				mutex.Unlock()
			}
		}()
	}
	groups.Wait()
	return histories
}

// explain prints a history, and which operations no order reaches.
func explain(model porcupine.Model, info porcupine.LinearizationInfo, ops []porcupine.Operation) {
	var longest []porcupine.Operation
	for _, partition := range info.PartialLinearizationsOperations() {
		for _, order := range partition {
			if len(order) > len(longest) {
				longest = order
			}
		}
	}
	line := func(op porcupine.Operation) string {
		end := "ever"
		if op.Return != math.MaxInt64 {
			end = fmt.Sprint(op.Return / 1e3)
		}
		what := model.DescribeOperation(op.Input, op.Output)
		return fmt.Sprintf("%6d to %s µs, client %d: %s", op.Call/1e3, end, op.ClientId, what)
	}
	ordered := map[string]bool{}
	state := model.Init()
	fmt.Println("the longest order:")
	for _, op := range longest {
		_, state = model.Step(state, op.Input, op.Output)
		fmt.Printf("  %s -> %s\n", line(op), model.DescribeState(state))
		ordered[line(op)] = true
	}
	fmt.Println("in no order:")
	for _, op := range ops {
		if !ordered[line(op)] {
			fmt.Println("  " + line(op))
		}
	}
}

// report counts what was checked.
type report struct {
	operations, grants, unknowns, notJudged, undecided, planted int
	found                                                       map[string]int
}

// check demands that every history is linearizable, and that every planted violation is found.
func check(histories []*history, out string) error {
	model := model()
	total := report{found: map[string]int{}}
	for n, history := range histories {
		ops, notJudged := history.decided()
		total.count(history, notJudged)
		result, info := porcupine.CheckOperationsVerbose(model, ops, patience)
		switch result {
		case porcupine.Unknown:
			total.undecided++
			continue
		case porcupine.Illegal:
			picture := filepath.Join(out, fmt.Sprintf("history-%d.html", n))
			if err := porcupine.VisualizePath(model, info, picture); err != nil {
				return err
			}
			explain(model, info, ops)
			lock := history.ops[0].Input.(request).lock
			return fmt.Errorf("the answers about %s are not linearizable: see %s", lock, picture)
		}
		// The search for an order takes longest if outcomes are unknown.
		if total.planted < mostPlanted && history.unknowns() == 0 {
			total.planted++
			if err := total.plant(model, n, ops); err != nil {
				return err
			}
		}
	}
	fmt.Printf("tests/histories: %d histories with %d operations: %d grants, %d outcomes unknown\n",
		len(histories), total.operations, total.grants, total.unknowns)
	fmt.Printf("tests/histories: linearizable; %d answers judged in part or not at all, %d histories not decided in time\n",
		total.notJudged, total.undecided)
	fmt.Printf("tests/histories: planted violations found: %v\n", total.found)
	if total.undecided*20 > len(histories) {
		return fmt.Errorf("%d of %d histories were not decided", total.undecided, len(histories))
	}
	for _, what := range violations {
		if total.found[what] == 0 {
			return fmt.Errorf("no planted violation was found: %s", what)
		}
	}
	return nil
}

func (r *report) count(history *history, notJudged int) {
	r.notJudged += notJudged
	r.unknowns += history.unknowns()
	for _, op := range history.ops {
		asked, got := op.Input.(request), op.Output.(answer)
		if asked.kind == ghostEnds {
			// It is the second half of one request.
			continue
		}
		r.operations++
		if asked.kind == acquire && got.outcome == granted {
			r.grants++
		}
	}
}

// plant demands that the checker finds each violation in a history without any.
func (r *report) plant(model porcupine.Model, n int, ops []porcupine.Operation) error {
	for what, ops := range plants(ops) {
		switch porcupine.CheckOperationsTimeout(model, ops, patience) {
		case porcupine.Illegal:
			r.found[what]++
		case porcupine.Ok:
			return fmt.Errorf("a planted violation was not found: %s, in history %d", what, n)
		}
	}
	return nil
}
