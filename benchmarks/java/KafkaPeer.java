import org.apache.kafka.server.util.timer.SystemTimer;
import org.apache.kafka.server.util.timer.TimerTask;

/**
 * Kafka's SystemTimer, tick 1 ms, size 20: hierarchical wheels with a DelayQueue of buckets.
 *
 * <p>add() and cancel() run on the caller's thread. No reaper thread polls the queue at that time,
 * which spares add() the wake-ups that it would cause in a broker.
 */
final class KafkaPeer extends Peer {
    private SystemTimer timer;

    private static final class Task extends TimerTask {
        private final Fired fired;

        Task(long delayMs, Fired fired) {
            super(delayMs);
            this.fired = fired;
        }

        @Override
        public void run() {
            fired.add();
        }
    }

    @Override
    void open() {
        long nowMs = System.nanoTime() / 1_000_000;
        timer = new SystemTimer("peer", 1, 20, nowMs);
    }

    @Override
    Object schedule(int delayMs) {
        Task task = new Task(delayMs, null);
        timer.add(task);
        return task;
    }

    @Override
    void cancel(Object handle) {
        ((Task) handle).cancel();
    }

    @Override
    long expire(int[] delaysMs) throws Exception {
        open();
        Fired fired = new Fired(delaysMs.length);
        for (int delayMs : delaysMs) {
            timer.add(new Task(delayMs, fired));
        }
        Thread.sleep(EXPIRE_MS + 50);
        long started = System.nanoTime();
        while (timer.size() > 0) {
            timer.advanceClock(0);
        }
        fired.await();
        long elapsed = System.nanoTime() - started;
        close();
        return elapsed;
    }

    @Override
    void close() {
        timer.close();
        timer = null;
    }

    public static void main(String[] arguments) throws Exception {
        new KafkaPeer().run(arguments);
    }
}
